"""Norm on Metal: how a row is spread over simdgroups, and the launch.

Memory bounds it. A short row belongs to one simdgroup, four rows to a threadgroup; a long row gets a threadgroup of its
own. A thread keeps what it has read of y in registers, so y crosses the bus once for every N up to 16384.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Operands, Problem, merged_axes

_KERNEL = "gated_rmsnorm"
_ROWS = 4  # short rows of a threadgroup
_PER_THREAD = 16  # elements of y that a thread keeps
_MOST_SIMDGROUPS = 32


def launcher(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p, n = problem, problem.n
    if p.rows == 0:
        return lambda operands: None
    axes = merged_axes(p.batch, p.y, p.z)
    shape = [n, p.rows, *(value for axis in axes for value in axis)]

    def variant(width: int) -> metal.Launch:
        most = _MOST_SIMDGROUPS
        while True:
            simds = min(most, -(-n // (32 * _PER_THREAD)))  # simdgroups of one row
            per_group = min(_ROWS, most) if simds == 1 else 1  # rows of one threadgroup
            kept = min(_PER_THREAD // width, -(-n // (32 * width * simds)))
            built = library.load(
                source, target, Y_TYPE=p.y_dtype, Z_TYPE=p.dtype, W_TYPE=p.w_dtype, WIDTH=width, ROWS=per_group,
                SIMDS=simds, KEPT=kept, RANK=len(axes),
            )  # fmt: skip
            limit = metal.most_simdgroups(built, _KERNEL)
            if simds * per_group <= limit:
                groups = -(-p.rows // per_group)
                return metal.launcher(built, _KERNEL, (groups, 1, 1), simds * per_group * metal.SIMD)
            most = limit

    run = metal.by_alignment(variant, (n, *(step for axis in axes for step in axis[1:])))

    def launch(o: Operands) -> None:
        run((o.y, o.z, o.w, o.out), (o.y, o.z, o.w, o.out, shape, o.eps))

    return launch
