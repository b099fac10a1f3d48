"""gated_rmsnorm on Metal: how a row is spread over simdgroups, and the launch.

Memory bounds it. A short row belongs to one simdgroup, four rows to a threadgroup; a long row gets a threadgroup of its
own. A thread keeps what it has read of y in registers, so y crosses the bus once for every N up to 16384.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import launch as metal
from torch_attnkit.mps import library

_ROWS = 4  # short rows of a threadgroup
_PER_THREAD = 16  # elements of y that a thread keeps
_MOST_SIMDGROUPS = 32


def _merged(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[int]:
    """The batch axes as (size, step, step, ...) one after another, axes that step on evenly merged into one."""
    axes: list[list[int]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(outer == size * inner for outer, inner in zip(axes[-1][1:], steps, strict=True)):
            axes[-1] = [axes[-1][0] * size, *steps]
        else:
            axes.append([size, *steps])
    return [value for axis in axes or [[1] + [0] * len(strides)] for value in axis]


def build(call: Call, target: Target) -> Callable[..., None]:
    y, z, w, n = call.arg.y, call.arg.z, call.arg.w, call.dim["N"]
    rows = math.prod(call.batch)
    if rows == 0:
        return lambda *args: None
    axes = _merged(call.batch, y.stride()[:-1], z.stride()[:-1])
    shape = [n, rows, *axes]

    def variant(width: int) -> metal.Launch:
        most = _MOST_SIMDGROUPS
        while True:
            simds = min(most, -(-n // (32 * _PER_THREAD)))  # simdgroups of one row
            per_group = min(_ROWS, most) if simds == 1 else 1  # rows of one threadgroup
            kept = min(_PER_THREAD // width, -(-n // (32 * width * simds)))
            built = library.load(
                call.op, target, Y_TYPE=y.dtype, Z_TYPE=z.dtype, W_TYPE=w.dtype, WIDTH=width, ROWS=per_group,
                SIMDS=simds, KEPT=kept, RANK=len(axes) // 3,
            )  # fmt: skip
            limit = metal.most_simdgroups(built, call.op)
            if simds * per_group <= limit:
                groups = -(-rows // per_group)
                return metal.launcher(built, call.op, (groups, 1, 1), simds * per_group * metal.SIMD)
            most = limit

    run = metal.by_alignment(variant, (n, *axes[1::3], *axes[2::3]))

    def launch(y: Any, z: Any, w: Any, eps: float, out: Any) -> None:
        run((y, z, w, out), (y, z, w, out, shape, eps))

    return launch
