"""Which decode kernel of Blackwell takes a problem, and how its launch is cut. Imports no cutlass."""

from __future__ import annotations

from ..config import SHARED, SplitLayout
from ..plan import FEW, Bits, Plan, mma, paged
from ..problem import Problem
from .config import CLUSTER, KEYS, Tcgen05Config

DTYPES, CODES = "bf16 f16", "f8e4m3"  # of q and the caches; codes have ``tcgen05.py`` alone
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
OF_CODES = tuple(head for head, here in HEADS.items() if here)
_SMALL = 4 * 1024  # of shared memory, of which statistics and barriers take less than this
_MOST_HEADS = 64  # of a CTA
_AT_ONCE = 8  # buffers on the way, 128 or 256 KB: more than memory's latency needs


def plan(problem: Problem, sms: int, *, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: one tensor is keys and values.

    docs/kernels/decode.md has the counts by which the kernels were set apart.
    """
    keys = problem.scores.most_keys(problem.capacity)
    if problem.codes and problem.dtype.itemsize > 1:
        return mma(problem, keys, sms)
    many = problem.group > FEW or problem.dtype.itemsize == 1 or problem.dim == 512
    if HEADS[problem.dim, problem.dim_v] and many:
        return _clusters(problem, keys, sms, same)
    return mma(problem, keys, sms)


def _clusters(problem: Problem, most_keys: int, sms: int, same: bool) -> Plan:
    """``blocks`` are clusters, ``combine_blocks`` the CTAs of one that share the keys of a side.

    These are as many as the chip has room for if every group has a cluster, but no more than there are tiles.
    """
    dim, group, itemsize = problem.dim, problem.group, problem.dtype.itemsize
    heads = next(n for n in (16, 32, _MOST_HEADS) if n >= min(group, _MOST_HEADS))
    sides = 2 if group > _MOST_HEADS else 1
    head_blocks = -(-group // (heads * sides))
    config = Tcgen05Config(Bits(8 * itemsize), dim, heads, sides, stages=0)
    room = SHARED - _SMALL - config.shared.ring.offset
    tiles, work = -(-most_keys // KEYS), max(problem.batch * problem.kv_heads * head_blocks, 1)
    splits = 1
    while splits * sides < CLUSTER and 2 * splits * sides * work <= sms and splits < tiles:
        splits *= 2
    whole = tiles <= splits
    least = 1 if whole else max(splits * 3 // 4, 1)
    clusters = min(sms // (splits * sides), work if whole else max(work * tiles // least, 1))
    stages = min(room // config.stage_bytes, _AT_ONCE * 2 // itemsize)
    return Plan(
        "trace_tcgen05",
        paged(problem) | dict(dim=dim, heads=heads, sides=sides, stages=stages, same=same),
        head_blocks,
        1,
        whole,
        least,
        clusters,
        splits,
        2 * clusters * sides * SplitLayout(heads, dim).floats,
        clusters * sides * splits,
    )
