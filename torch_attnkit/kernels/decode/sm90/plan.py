"""Which decode kernel of Hopper takes a problem, and how its launch is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.cuda.sm90.warpgroup import ROWS, THREADS
from torch_attnkit.cuda.smem import RESERVED, SHARED
from torch_attnkit.cuda.workspace import SplitLayout

from ..config import FLAG_BYTES
from ..plan import FEW, SHORT, Bits, Plan, combines, mma, paged, splits_of
from ..problem import Problem
from ..traces import trace_mla, trace_wgmma
from .config import COUNTERS, WgmmaConfig

DTYPES, OVER_CODES = "bf16 f16", "bf16 f16 f8e4m3"  # of q, over caches of the same dtype and of E4M3


@dataclass(frozen=True)
class Head:
    """A head size. Without ``tile`` only ``mma.py`` has it; a group of more than 8 query heads is cut for that.

    Few heads are faster with ``wgmma.py``, too, once there is enough to read: ``much`` bytes of keys and values for
    every SM; over pages, between the two numbers of ``much_paged``; without pages, from ``many`` keys on.
    """

    tile: tuple[int, int] | None = None  # of ``wgmma.py``: keys, and blocks on an SM
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
_LATENT = 512  # the head size of ``mla.py``, if one tensor is keys and values
_MLA = (48, 3)  # its keys of a tile, and tiles in memory
_LEAST = 128  # keys of a split at least, for it has 64 rows to write and to combine


def plan(problem: Problem, sms: int, *, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: one tensor is keys and values.

    docs/lab/decode.md has the times by which the kernels were set apart.
    """
    head = HEADS[problem.dim, problem.dim_v]
    keys = problem.scores.most_keys(problem.capacity)
    if not problem.codes and head.tile is not None and (problem.group > FEW or _is_much(head, problem, keys, sms)):
        return _rows_of_heads(head.tile, problem, keys, sms, same)
    return mma(problem, keys, sms)


def _is_much(head: Head, problem: Problem, keys: int, sms: int) -> bool:
    """Whether reading takes so long that few heads are faster with ``wgmma.py``, too."""
    if not problem.page and head.many is not None and keys >= head.many:
        return True
    if keys <= SHORT:
        return False
    groups, row = problem.batch * problem.kv_heads, (problem.dim + problem.dim_v) * problem.dtype.itemsize
    nbytes = groups * keys * row
    if problem.page:
        return head.much_paged is not None and sms * head.much_paged[0] <= nbytes <= sms * head.much_paged[1]
    return head.much is not None and sms * head.much <= nbytes


def _rows_of_heads(tile: tuple[int, int], problem: Problem, most_keys: int, sms: int, same: bool) -> Plan:
    """For ``wgmma.py`` and ``mla.py``: up to 64 heads a block, whose splits are that much longer."""
    dim, group, groups, itemsize = problem.dim, problem.group, problem.batch * problem.kv_heads, problem.dtype.itemsize
    latent = same and dim == _LATENT
    keys, per_sm = (_MLA[0], 1) if latent else tile
    whole = most_keys <= SHORT
    config = WgmmaConfig(Bits(8 * itemsize), dim, keys, stages=0)
    room = SHARED // per_sm - RESERVED - FLAG_BYTES - config.shared.sums.end
    stages = _MLA[1] if latent else min(room // config.ring.stage_bytes, 8)
    blocks, head_blocks, least = sms * per_sm, -(-group // ROWS), 1 if whole else -(-_LEAST // keys)
    work, abreast = groups * head_blocks, _abreast(blocks, head_blocks)
    sizes, combine = paged(problem) | dict(dim=dim, keys=keys, stages=stages, same=same), False
    if not latent:
        splits = 1 if whole else splits_of(blocks // abreast, work // abreast, -(-most_keys // keys), least)
        combine = combines(min(group, ROWS), dim, THREADS * config.halves, splits)
        sizes["combine"] = combine
    return Plan(
        trace_mla if latent else trace_wgmma,
        sizes,
        head_blocks,
        abreast,
        whole,
        least,
        blocks,
        min(work * min(group, ROWS), sms) if combine else 0,
        2 * blocks * SplitLayout(ROWS, dim).floats,
        COUNTERS * blocks if latent else blocks,
    )


def _abreast(blocks: int, head_blocks: int) -> int:
    """How many of a KV head's head blocks go along its keys at the same time: all, or, not to idle more than a 16th of
    the blocks, one."""
    return head_blocks if blocks // head_blocks * head_blocks * 16 >= blocks * 15 else 1
