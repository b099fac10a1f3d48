"""Merge on Metal: a simdgroup for every 128 elements of an output row. Bound by memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Operands, Problem

_KERNEL = "merge_partials"
_SPAN = 128  # elements of a simdgroup, MERGE_SPAN of the kernel
_SIMDGROUPS = 4
_COLUMNS = 1 << 24  # threadgroups along x: with 128 threads each half of what a grid can count


def _nothing(operands: Operands) -> None:
    operands.out.zero_()
    operands.lse.fill_(-math.inf)


def launcher(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p = problem
    spans = max(-(-p.dim_v // _SPAN), 1)
    items = p.rows * p.heads * spans
    if p.rows * p.heads == 0:
        return lambda operands: None
    if p.parts == 0:
        return _nothing
    sums = (-1, 0) if p.row_sum is None else p.row_sum[:2]
    shape = [p.parts, p.rows, p.heads, p.dim_v, spans, *p.part[:3], *p.lse[:2], *sums, int(p.sink)]

    def variant(width: int) -> metal.Launch:
        built = library.load(source, target, IN_TYPE=p.dtype, OUT_TYPE=p.out_dtype, WIDTH=width)
        simds = min(_SIMDGROUPS, metal.most_simdgroups(built, _KERNEL))
        groups = -(-items // simds)
        columns = min(groups, _COLUMNS)
        return metal.launcher(built, _KERNEL, (columns, -(-groups // columns), 1), simds * metal.SIMD)

    run = metal.by_alignment(variant, (p.dim_v, *p.part[:3]))

    def launch(o: Operands) -> None:
        sink, row_sum = metal.bound(o.sink, o.lse), metal.bound(o.row_sum, o.lse)
        run((o.part, o.out), (o.part, o.lse_part, sink, row_sum, o.out, o.lse, shape))

    return launch
