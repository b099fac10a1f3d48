"""Launch planning of the Blackwell kernel: head sizes, which caches TMA can index by row, and a cost model of the
split.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from torch_attnkit.cuda.workspace import SplitLayout

from ..problem import Operands, Problem
from ..sm90.plan import LEAST_BYTES, Plan, share
from .config import KEYS, MOST_CTAS, MOST_HEADS, MOST_SIDES

_MOST = 1 << 30  # rows of a cache, and keys of a request: row indices have 32 bits


@dataclass(frozen=True)
class StridedProblem(Problem):
    """``uniform``: all rows of each cache have one stride, so TMA can index them."""

    uniform: bool = False


def with_row_layout(problem: Problem, near: torch.Tensor, far: torch.Tensor | None) -> StridedProblem:
    """The problem with its caches' row layout. A cache without rows is ignored: the other one stands in for it."""
    caches = [rows for rows in (near, far) if rows is not None and rows.numel()]
    few = problem.capacity < _MOST and problem.entries < _MOST
    found = problem.format == "none" and bool(caches) and few and all(map(_uniform, caches))
    return StridedProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)}, uniform=found)


def with_stand_ins(operands: Operands) -> Operands:
    """Replace a cache without rows by the other one: TMA descriptors need rows."""
    near, far = operands.near, operands.far
    some = near if far is None or near.numel() else far
    return operands._replace(near=some, far=far if far is not None and far.numel() else some)


def _uniform(rows: torch.Tensor) -> bool:
    """Whether a cache (R, S, D), or (N, P, D) in pages, is part of one matrix of constant row stride."""
    first, size, dim = rows.shape
    apart, pitch, _ = rows.stride()
    return first > 0 and size > 1 and dim <= pitch and (first == 1 or apart % pitch == 0) and _rows(rows) < _MOST


def _rows(rows: torch.Tensor) -> int:
    """Of that matrix."""
    first, size, _ = rows.shape
    apart, pitch, _ = rows.stride()
    return (first - 1) * (apart // pitch) + size


__all__ = ["DTYPES", "HEADS", "LEAST_BYTES", "plan"]

DTYPES = "bf16 f16"
# D: multiples of 128, of which Q of 64 heads and a tile of 128 keys fit in shared memory, and S' and O' of 64 heads in
# tensor memory.
HEADS = (128, 256, 512)
# Microseconds, modelled, never measured: of a launch, of a work tile beside its keys, of the products and the softmax
# of a tile of keys, of a key's 512 columns on their way to a CTA, of a cluster's merge; of joining clusters through
# device memory, of each of them, and of each megabyte that they leave and read there.
_START, _WORK_TILE, _TILE, _KEY, _MERGE = 4.0, 2.0, 0.9, 1 / 75, 1.5
_JOIN, _SPLIT, _MEGABYTE = 2.0, 0.15, 0.5


def heads_of(heads: int) -> tuple[int, int]:
    """(heads of a CTA, sides)."""
    return next(n for n in (16, 32, MOST_HEADS) if n >= min(heads, MOST_HEADS)), MOST_SIDES if heads > MOST_HEADS else 1


def cost(problem: Problem, work: int, ctas: int, groups: int, sms: int) -> float:
    """Microseconds, roughly, of ``work`` work tiles, each by ``groups`` clusters in which ``ctas`` CTAs share a side's
    keys."""
    heads, sides = heads_of(problem.heads)
    rounds = -(-work * groups // max(1, sms // (ctas * sides)))
    keys = share(problem.keys, ctas * groups)
    columns = problem.dim / 512
    work_tile = _WORK_TILE + (-(-keys // KEYS) * _TILE + keys / sides * _KEY) * columns
    merge = _MERGE if ctas > 1 else 0.0
    if groups > 1:
        left = work * groups * sides * SplitLayout(heads, problem.dim).nbytes * 1e-6
        merge += _JOIN + _SPLIT * groups + _MEGABYTE * left
    return _START + rounds * work_tile + merge


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors. A work tile is a token with the heads of all sides; ``ctas`` of
    a cluster share a side's keys."""
    heads, sides = heads_of(problem.heads)
    head_blocks = -(-problem.heads // (heads * sides))
    work = problem.tokens * head_blocks
    cuts = [
        (ctas, groups)
        for ctas in range(1, max(1, min(MOST_CTAS, sms) // sides) + 1)
        for groups in range(1, max(1, sms // (ctas * sides) // work) + 1)
    ]
    ctas, groups = min(cuts, key=lambda cut: cost(problem, work, *cut, sms))
    paged = problem.near_paged, problem.far_paged  # if both are, one side has no contiguous tiles
    sizes = dict(
        dim=problem.dim, heads=heads, sides=sides, split_kv=ctas * groups > 1,
        paged=paged, format=problem.format, rope_dim=problem.rope_dim,
        align=problem.align, divided=problem.divided, fp4=problem.fp4_signature,
        tma_rows=isinstance(problem, StridedProblem) and problem.uniform and (sides > 1 or not all(paged)),
    )  # fmt: skip
    floats = work * groups * sides * SplitLayout(heads, problem.dim).floats if groups > 1 else 0
    counters = work * MOST_CTAS if groups > 1 else 0
    return Plan(sizes, head_blocks, ctas, groups, work, floats, counters)
