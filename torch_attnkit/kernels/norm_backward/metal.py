"""The norm's backward on Metal: how rows are spread over simdgroups, and the two launches.

Memory bounds it. A short row belongs to one simdgroup, four rows to a threadgroup; a long row gets a threadgroup of its
own, and reads grad, y, z and w a second time, from the cache as far as it holds them. A threadgroup goes on to further
rows, so that a thread adds up the shares of dw of its columns; a second launch adds up what all left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.kernels.norm.problem import merged_axes
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

from .problem import Operands, Problem, nothing

_KERNEL = "gated_rmsnorm_backward"
_SUMS = "gated_rmsnorm_sums"
_ROWS = 4  # short rows of a threadgroup
_PER_THREAD = 16  # elements of a row whose shares of dw a thread keeps
_MOST_SIMDGROUPS = 32
_MOST_PARTS = 256  # threadgroups: several for each core of the largest chips, and few rows of sums
_SUM_SIMDS = 8


def launcher(source: str, problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with ``csrc/metal/<source>.metal``."""
    p, n = problem, problem.n
    if p.rows == 0:
        return nothing
    axes = merged_axes(p.batch, p.grad, p.y, p.z)

    def variant(width: int) -> metal.Launch:
        most = _MOST_SIMDGROUPS
        while True:
            simds = min(most, -(-n // (32 * _PER_THREAD)))  # simdgroups of one row
            per_group = min(_ROWS, most) if simds == 1 else 1  # rows of one threadgroup, side by side
            kept = min(_PER_THREAD // width, -(-n // (32 * width * simds)))
            built = library.load(
                source, target, Y_TYPE=p.y_dtype, Z_TYPE=p.dtype, W_TYPE=p.w_dtype, WIDTH=width, ROWS=per_group,
                SIMDS=simds, KEPT=kept, RANK=len(axes), SUM_SIMDS=_SUM_SIMDS,
            )  # fmt: skip
            limit = metal.most_simdgroups(built, _KERNEL)
            if simds * per_group <= limit:
                break
            most = limit
        parts = min(-(-p.rows // per_group), _MOST_PARTS)
        rows = metal.launcher(built, _KERNEL, (parts, 1, 1), simds * per_group * metal.SIMD)
        total = metal.launcher(built, _SUMS, (-(-n // 32), 1, 1), _SUM_SIMDS * metal.SIMD)
        shape = [n, p.rows, parts, *(value for axis in axes for value in axis)]

        def both(args: metal.Arguments) -> None:
            inputs, eps, dw = args
            sums = torch.empty(parts * per_group, n, dtype=torch.float32, device=dw.device)
            rows((*inputs, sums, shape, eps))
            total((sums, dw, [n, parts * per_group]))

        return both

    run = metal.by_alignment(variant, (n, *(step for axis in axes for step in axis[1:])))

    def launch(o: Operands) -> None:
        run((o.grad, o.y, o.z, o.w, o.dy, o.dz), ((o.grad, o.y, o.z, o.w, o.dy, o.dz), o.eps, o.dw))

    return launch
