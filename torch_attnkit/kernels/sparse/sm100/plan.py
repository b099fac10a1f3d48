"""Which head sizes the kernel of Blackwell has, and how its launch is cut."""

from __future__ import annotations

from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.cuda.workspace import SplitLayout

from ..problem import Fp4, Problem
from ..sm90.plan import LEAST_BYTES, Plan, share
from .config import KEYS, MOST_CTAS, MOST_HEADS, MOST_SIDES
from .problem import Located

__all__ = ["DTYPES", "HEADS", "LEAST_BYTES", "plan"]

DTYPES = "bf16 f16"
# D: multiples of 128, of which Q of 64 heads and a tile of 128 keys fit in shared memory, and S' and O' of 64 heads in
# tensor memory.
HEADS = (128, 256, 512)
# Microseconds, modelled, never measured: of a launch, of a work tile beside its keys, of the products and the softmax
# of a tile of keys, of a key's 512 columns on their way to a CTA, of a cluster's merge; of joining clusters through
# device memory, of each of them, and of each megabyte that they leave and read there.
_START, _TURN, _TILE, _KEY, _MERGE = 4.0, 2.0, 0.9, 1 / 75, 1.5
_JOIN, _SPLIT, _MEGABYTE = 2.0, 0.15, 0.5


def heads_of(heads: int) -> tuple[int, int]:
    """Heads of a CTA, and CTAs with other heads that have the same keys."""
    return next(n for n in (16, 32, MOST_HEADS) if n >= min(heads, MOST_HEADS)), MOST_SIDES if heads > MOST_HEADS else 1


def cost(problem: Problem, work: int, ctas: int, groups: int, sms: int) -> float:
    """Microseconds, roughly, of ``work`` work tiles by so many clusters each, in which so many CTAs of a side share
    the keys."""
    heads, sides = heads_of(problem.heads)
    rounds = -(-work * groups // max(1, sms // (ctas * sides)))
    keys = share(problem.keys, ctas * groups)
    columns = problem.dim / 512
    turn = _TURN + (-(-keys // KEYS) * _TILE + keys / sides * _KEY) * columns
    merge = _MERGE if ctas > 1 else 0.0
    if groups > 1:
        left = work * groups * sides * SplitLayout(heads, problem.dim).nbytes * 1e-6
        merge += _JOIN + _SPLIT * groups + _MEGABYTE * left
    return _START + rounds * turn + merge


def _fp4(results: Fp4 | None) -> tuple[Any, ...] | None:
    """As the kernel is compiled with it."""
    if results is None:
        return None
    r = results
    return (r.format, r.pairs, short(r.angle_dtype), r.swizzled, r.divided)


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors. A *work tile* is a token with the heads of one CTA or of both
    sides; ``ctas`` are those of a cluster that share the keys of a side."""
    heads, sides = heads_of(problem.heads)
    head_blocks = -(-problem.heads // (heads * sides))
    work = problem.tokens * head_blocks
    cuts = [
        (ctas, groups)
        for ctas in range(1, max(1, min(MOST_CTAS, sms) // sides) + 1)
        for groups in range(1, max(1, sms // (ctas * sides) // work) + 1)
    ]
    ctas, groups = min(cuts, key=lambda cut: cost(problem, work, *cut, sms))
    paged = problem.near_paged, problem.far_paged  # of both, one side finds no tiles for boxes
    sizes = dict(
        dim=problem.dim, heads=heads, sides=sides, merge=ctas * groups > 1,
        paged=paged, format=problem.format, rope_dim=problem.rope_dim,
        align=problem.align, divided=problem.divided, fp4=_fp4(problem.fp4),
        numbered=isinstance(problem, Located) and problem.even and (sides > 1 or not all(paged)),
    )  # fmt: skip
    floats = work * groups * sides * SplitLayout(heads, problem.dim).floats if groups > 1 else 0
    counters = work * MOST_CTAS if groups > 1 else 0
    return Plan(sizes, head_blocks, ctas, groups, work, floats, counters)
