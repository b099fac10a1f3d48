"""Which decode kernel of Blackwell takes a problem, and how its launch is cut."""

from __future__ import annotations

from dataclasses import replace

from torch_attnkit.core import invariance
from torch_attnkit.cuda.smem import SHARED
from torch_attnkit.cuda.workspace import SplitLayout

from ..plan import FEW, Bits, Plan, mma, paged
from ..problem import LATENTS, Problem
from ..traces import trace_tcgen05
from .config import CLUSTER, KEYS, Tcgen05Config

DTYPES, FP8 = "bf16 f16", "f8e4m3"  # of q and the caches; fp8 queries have ``tcgen05.py`` alone
# (D, Dv): multiples of 16; and whether ``tcgen05.py`` has it, which can be where both are 64 or the same multiple of
# 128. Then it takes more than 8 query heads, E4M3, and 512 columns, for which ``mma.py`` needs a second launch.
HEADS = {
    (32, 32): False,
    (64, 64): True,
    (80, 80): False,
    (96, 96): False,
    (128, 128): True,
    (192, 128): False,
    (256, 256): True,
    (512, 512): True,
}
FP8_HEADS = tuple(head for head, here in HEADS.items() if here)
_SMALL = 4 * 1024  # of shared memory, of which statistics and barriers take less than this
_HEADS = (64, 32, 16)  # of a CTA
_SIDES = (1, 2, 4)  # of a cluster
_MOST_HEADS = 128  # of a cluster
_IN_FLIGHT = 8  # stages in flight, 128 or 256 KB: more than memory's latency needs


def plan(problem: Problem, sms: int, *, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: one tensor is keys and values, these its
    first columns.

    docs/lab/decode.md has the counts by which the kernels were set apart.
    """
    keys = problem.scores.most_keys(problem.capacity)
    if problem.fp8_kv and problem.dtype.itemsize > 1:
        return mma(problem, keys, sms)
    many = problem.group > FEW or problem.dtype.itemsize == 1 or problem.dim == 512
    if (problem.dim, problem.dim_v) in LATENTS or (HEADS[problem.dim, problem.dim_v] and many):
        return _clusters(problem, keys, sms, same)
    return mma(problem, keys, sms)


def _clusters(problem: Problem, most_keys: int, sms: int, same: bool) -> Plan:
    """For ``tcgen05.py``. ``blocks`` are clusters, ``combine_blocks`` the CTAs of one that share the keys of a side.

    These are as many as the chip has room for if every group has a cluster, but no more than there are tiles.
    """
    group, itemsize = problem.group, problem.dtype.itemsize

    def of(heads: int, sides: int = 1) -> Tcgen05Config:
        """With as many stages as there is room for."""
        config = Tcgen05Config(Bits(8 * itemsize), problem.dim, problem.dim_v, heads, sides, stages=0, same=same)
        capacity = SHARED - _SMALL - config.shared.ring.offset
        return replace(config, stages=min(capacity // config.stage_bytes, _IN_FLIGHT * 2 // itemsize))

    most = next(n for n in _HEADS if of(n).stages >= of(n).parts)
    heads = next(n for n in reversed(_HEADS) if n >= min(group, most))
    most_sides = _MOST_HEADS // heads
    sides = next(n for n in _SIDES if n * heads >= group or n == most_sides)
    head_blocks = -(-group // (heads * sides))
    tiles, work = -(-most_keys // KEYS), max(problem.batch * problem.kv_heads * head_blocks, 1)
    splits = 1
    invariant = invariance.is_on()
    while not invariant and splits * sides < CLUSTER and 2 * splits * sides * work <= sms and splits < tiles:
        splits *= 2
    whole = invariant or tiles <= splits
    least = 1 if whole else max(splits * 3 // 4, 1)
    blocks = min(sms // (splits * sides), work if whole else max(work * tiles // least, 1))
    sizes = dict(
        dim=problem.dim, dim_v=problem.dim_v, heads=heads, sides=sides, stages=of(heads, sides).stages, same=same
    )
    return Plan(
        trace_tcgen05,
        paged(problem) | sizes,
        head_blocks,
        1,
        whole,
        least,
        blocks,
        splits,
        2 * blocks * sides * SplitLayout(heads, problem.dim_v).floats,
        blocks * sides * splits,
    )
