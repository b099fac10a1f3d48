"""Which decode kernel of Hopper takes a problem, and how its launch is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.core import invariance
from torch_attnkit.cuda.sm90.warpgroup import ROWS, THREADS
from torch_attnkit.cuda.smem import RESERVED, SHARED
from torch_attnkit.cuda.workspace import SplitLayout

from ..config import FLAG_BYTES
from ..plan import FEW, SHORT, Bits, Plan, combines, is_whole, mma, paged, splits_of
from ..problem import LATENTS, Problem
from ..traces import trace_mla, trace_wgmma
from .config import COUNTERS, WgmmaConfig

DTYPES, FP8_KV_DTYPES = "bf16 f16", "bf16 f16 f8e4m3"  # of q, over caches of the same dtype and of E4M3


@dataclass(frozen=True)
class Head:
    """A head size. Without ``tile`` only ``mma.py`` has it; a group of more than 8 query heads is cut for that.

    Few heads are faster with ``wgmma.py``, too, once there is enough to read: ``much`` bytes of keys and values for
    every SM; over pages, between the two numbers of ``much_paged``; without pages, from ``many`` keys on.
    """

    tile: tuple[int, int] | None = None  # of ``wgmma.py``: keys, and CTAs on an SM
    much: int | None = None
    much_paged: tuple[int, int] | None = None
    many: int | None = None


HEADS = {  # (D, Dv): multiples of 16; with a tile equal, and of 64
    (32, 32): Head(),
    (64, 64): Head((64, 2), much=3 << 19),
    (80, 80): Head(),
    (96, 96): Head(),
    (128, 128): Head((64, 2), much=3 << 19, much_paged=(3 << 20, 6 << 20)),
    (192, 128): Head(),
    (256, 256): Head((32, 2), much=3 << 17),
    (512, 512): Head((32, 1), many=4096),
}
# Of ``mla.py``, by D and whether one tensor is keys and values: keys of a tile, and stages. Of 576 columns there is
# room for 128 keys beside Q and P: two tiles of 64, whose scores in two sums are 64 of a thread's 88 registers, two of
# 48 and one that is loaded late, or four of 32; of keys and values apart, two of each.
_MLA = {(512, True): (48, 3), (576, True): (32, 4), (576, False): (32, 2)}
_LEAST = 128  # keys of a split at least, for it has 64 rows to write and to combine


def plan(problem: Problem, sms: int, *, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: one tensor is keys and values, these its
    first columns.

    docs/lab/decode.md has the times by which the kernels were set apart.
    """
    keys, dims = problem.scores.most_keys(problem.capacity), (problem.dim, problem.dim_v)
    if dims not in LATENTS:
        head = HEADS[dims]
        few = problem.group <= FEW and not _is_much(head, problem, keys, sms)
        if problem.fp8_kv or head.tile is None or few:
            return mma(problem, keys, sms)
        if (problem.dim, same) not in _MLA:
            return _wgmma(head.tile, problem, keys, sms, same)
    return _mla(problem, keys, sms, same)


def _is_much(head: Head, problem: Problem, keys: int, sms: int) -> bool:
    """Whether reading takes so long that few heads are faster with ``wgmma.py``, too."""
    if invariance.is_on():
        return False
    if not problem.page and head.many is not None and keys >= head.many:
        return True
    if keys <= SHORT:
        return False
    groups, row = problem.batch * problem.kv_heads, (problem.dim + problem.dim_v) * problem.dtype.itemsize
    nbytes = groups * keys * row
    if problem.page:
        return head.much_paged is not None and sms * head.much_paged[0] <= nbytes <= sms * head.much_paged[1]
    return head.much is not None and sms * head.much <= nbytes


def _wgmma(tile: tuple[int, int], problem: Problem, most_keys: int, sms: int, same: bool) -> Plan:
    """For ``wgmma.py``: up to 64 heads a CTA, whose splits are that much longer."""
    keys, per_sm = tile
    dim, group, whole = problem.dim, problem.group, is_whole(most_keys)
    config = WgmmaConfig(Bits(8 * problem.dtype.itemsize), dim, keys, stages=0)
    capacity = SHARED // per_sm - RESERVED - FLAG_BYTES - config.shared.sums.end
    stages = min(capacity // config.ring.stage_bytes, 8)
    blocks, head_blocks, least = sms * per_sm, -(-group // ROWS), 1 if whole else -(-_LEAST // keys)
    work, concurrent = problem.batch * problem.kv_heads * head_blocks, _concurrent(blocks, head_blocks)
    splits = 1 if whole else splits_of(blocks // concurrent, work // concurrent, -(-most_keys // keys), least)
    combine = combines(min(group, ROWS), dim, THREADS * config.halves, splits)
    return Plan(
        trace_wgmma,
        paged(problem) | dict(dim=dim, keys=keys, stages=stages, same=same, combine=combine),
        head_blocks,
        concurrent,
        whole,
        least,
        blocks,
        min(work * min(group, ROWS), sms) if combine else 0,
        2 * blocks * SplitLayout(ROWS, dim).floats,
        blocks,
    )


def _mla(problem: Problem, most_keys: int, sms: int, same: bool) -> Plan:
    """For ``mla.py``: one CTA on an SM, with up to 64 heads."""
    keys, stages = _MLA[problem.dim, same]
    head_blocks, whole = -(-problem.group // ROWS), is_whole(most_keys)
    return Plan(
        trace_mla,
        paged(problem) | dict(dim=problem.dim, dim_v=problem.dim_v, keys=keys, stages=stages, same=same),
        head_blocks,
        _concurrent(sms, head_blocks),
        whole,
        1 if whole else -(-_LEAST // keys),
        sms,
        0,
        2 * sms * SplitLayout(ROWS, problem.dim_v).floats,
        COUNTERS * sms,
    )


def _concurrent(blocks: int, head_blocks: int) -> int:
    """How many of a KV head's head blocks go along its keys at the same time: all, or one where that would idle more
    than a 16th of the CTAs."""
    return head_blocks if blocks // head_blocks * head_blocks * 16 >= blocks * 15 else 1
