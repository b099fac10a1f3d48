"""How a decode launch is cut: what the plans of all architectures share. Knows sizes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_attnkit.core import invariance
from torch_attnkit.cuda.smem import RESERVED, SHARED
from torch_attnkit.cuda.workspace import SplitLayout

from .config import FLAG_BYTES, Fp8KvConfig, MmaConfig
from .problem import Problem
from .traces import trace_mma

if TYPE_CHECKING:
    from torch_attnkit.cuda.compile import Trace

# (D, Dv) over caches of E4M3: multiples of 32 could be, up to 256, as many columns as Q has registers for.
FP8_KV_HEADS = ((64, 64), (128, 128), (256, 256))
FEW = 8  # query heads that ``mma.py`` has at once
SHORT = 512  # keys of a group that one CTA attends alone
# Bytes of keys and values for every SM, from which on one CTA on it with longer tiles is faster: H200, 32/8 heads,
# D 128, 1x8192 15.9 for 17.5 us.
_LONG = 200 << 10
# Over pages, if these have 32 keys or a multiple, and up to this: H100, pages of 64, 1x8192 18.3 for 20.9 us, 2x8192
# 29.3 for 30.9, 4x8192 52.8 for 53.4, 8x8192 99.6 for 99.1 and 128x8192 1480 for 1463.
_LONG_PAGES = 3 << 19
# The same of E4M3, there with twice the warps; less is cut finer, into tiles of 16 keys: H200, 32/8 heads, D 128,
# 1x8192 13.9 us with 8 warps, 14.8 with two CTAs of 4 and 15.6 with tiles of 16 keys; 1x1024 10.3, 9.0 and 7.9.
_LONG_FP8 = 64 << 10
_PER_SM = 2  # CTAs on an SM: while one ends a group, the other keeps memory busy
# Waits for memory from which on a second kernel combines faster than the last CTA to arrive: H200, 16/2
# heads, D 256, 1x8192, 16 for 64 us.
_ROUNDS = 12


class Bits(NamedTuple):
    """What a kernel's config asks of its CuTeDSL dtype, for a plan that asks the config for sizes."""

    width: int


@dataclass(frozen=True)
class Plan:
    """A kernel, by its trace and what it is compiled with; and how it runs.

    A *group* is a KV head of a sequence with up to as many of its query heads as the kernel has at once; those of a KV
    head are ``head_blocks``. ``concurrent`` of them are on neighbouring CTAs at the same time, all or 1.
    ``sizes`` are entries of the kernel's Config, the other fields are scalars of a launch.
    """

    trace: Trace
    sizes: dict[str, Any]
    head_blocks: int
    concurrent: int
    whole: bool  # whether a group is one unit of work, else its tiles are, and it may be split
    least_tiles: int  # of a split
    blocks: int  # of the grid; on Blackwell clusters
    combine_blocks: int  # of a second kernel that combines the splits; on Blackwell CTAs of a cluster
    floats: int  # of the workspace
    counters: int


def mma(problem: Problem, keys_of_cache: int, sms: int) -> Plan:
    """For ``mma.py``, where a group sees at most ``keys_of_cache`` keys.

    docs/lab/decode.md has the times.
    """
    config = one_tile(problem)
    keys, stage = config.keys, config.stage_bytes
    capacity = SHARED // _PER_SM - RESERVED - FLAG_BYTES
    warps = next(w for w in (4, 3, 2, 1) if w * 3 * stage <= capacity)
    stages = min(capacity // (warps * stage), 6)
    per_sm = _PER_SM
    whole = is_whole(keys_of_cache)
    if keys_of_cache <= SHORT:
        stages = 2
        per_sm = replace(config, warps=warps, stages=stages).blocks_per_sm
    elif whole:
        pass  # nothing that decides on bits may follow from the batch: neither tiles nor warps
    elif problem.fp8_kv:
        keys, warps, stages, per_sm = _cut_fp8(config, _bytes(problem, keys_of_cache) // sms)
    elif _is_long(problem, keys_of_cache, sms):
        keys, per_sm = 32, 1
        stages = (SHARED - RESERVED - FLAG_BYTES) // (warps * replace(config, keys=keys).stage_bytes)
    return cut(problem, replace(config, keys=keys, warps=warps, stages=stages), keys_of_cache, sms * per_sm, sms)


def one_tile(problem: Problem) -> MmaConfig:
    """What ``mma.py`` would be compiled for with one warp and one tile in flight."""
    dim, dim_v = problem.dim, problem.dim_v
    heads = 8 if problem.group <= 8 or max(dim, dim_v) > 128 else 16
    keys = 32 if (dim + dim_v) * problem.itemsize <= 256 else 16
    kind = Fp8KvConfig if problem.fp8_kv else MmaConfig
    return kind(Bits(8 * problem.dtype.itemsize), dim, dim_v, heads, keys, warps=1, stages=1, page=problem.page)


def cut(problem: Problem, config: MmaConfig, keys_of_cache: int, blocks: int, sms: int) -> Plan:
    """A launch of ``mma.py``, cut as ``config`` says, on ``blocks`` CTAs."""
    whole, group, groups = is_whole(keys_of_cache), problem.group, problem.batch * problem.kv_heads
    heads, dim_v, head_blocks = config.heads, config.dim_v, -(-group // config.heads)
    least = 1 if whole else 2 * config.warps
    work = groups * head_blocks
    splits = 1 if whole else splits_of(blocks, work, -(-keys_of_cache // config.keys), least)
    combine = combines(min(group, heads), dim_v, config.threads, splits)
    return Plan(
        trace_mma,
        paged(problem)
        | (dict(fp8_kv=True, capped=problem.scores.capped) if problem.fp8_kv else {})
        | dict(dim=config.dim, dim_v=dim_v, heads=heads, keys=config.keys, warps=config.warps, stages=config.stages)
        | dict(combine=combine),
        head_blocks,
        1,
        whole,
        least,
        blocks,
        min(work * min(group, heads), sms) if combine else 0,
        2 * blocks * SplitLayout(heads, dim_v).floats,
        blocks,
    )


def is_whole(keys: int) -> bool:
    """Whether one CTA attends all of a group's ``keys``: where they are few, or the batch must not decide on splits."""
    return keys <= SHORT or invariance.is_on()


def _cut_fp8(config: MmaConfig, nbytes: int) -> tuple[int, int, int, int]:
    """Keys of a tile, warps, stages, and CTAs on an SM that has ``nbytes`` of keys and values to read."""
    if nbytes < _LONG_FP8:
        capacity = SHARED // _PER_SM - RESERVED - FLAG_BYTES
        return 16, 4, min(capacity // (4 * replace(config, keys=16).stage_bytes), 6), _PER_SM
    # Of 64 columns a tile has half of the bytes, and not half of the instructions.
    warps = 12 if config.dim == 64 and config.heads == 8 else 8
    return config.keys, warps, (SHARED - RESERVED - FLAG_BYTES) // (warps * config.stage_bytes), 1


def _is_long(problem: Problem, keys: int, sms: int) -> bool:
    """Whether there is so much to read that one CTA on an SM with longer tiles is faster; they lie in one page."""
    if problem.dim != 128 or problem.dim_v != 128:
        return False
    nbytes = _bytes(problem, keys)
    if problem.page:
        return problem.page % 32 == 0 and sms * _LONG <= nbytes < sms * _LONG_PAGES
    return nbytes >= sms * _LONG


def _bytes(problem: Problem, keys: int) -> int:
    """Of keys and values."""
    return problem.batch * problem.kv_heads * keys * (problem.dim + problem.dim_v) * problem.itemsize


def paged(problem: Problem) -> dict[str, int]:
    """The page size, of a signature that has one."""
    return dict(page=problem.page) if problem.page else {}


def splits_of(blocks: int, work: int, tiles: int, least: int) -> int:
    """Into how many splits a group is cut if all groups are equally long, and one more where cuts may fall anywhere."""
    return min(blocks, max(work * tiles // least, 1)) // max(work, 1) + 1


def combines(rows: int, dim_v: int, threads: int, splits: int) -> bool:
    """Whether a second kernel combines: by how often the last CTA would wait for memory, a thread of which has 4
    columns of 8 splits in flight."""
    return splits > 1 and -(-rows * dim_v // (4 * threads)) * -(-splits // 8) > _ROUNDS
