"""A quantised operand of the batched GEMM, as kernels are given it, and stand-ins to compile with."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute

from torch_attnkit.cuda import fake


class Coded(NamedTuple):
    packed: cute.Tensor  # (G, rows, K/2)
    scale: cute.Tensor  # (G, rows, blocks), or each group's in the 128x4 layout


def coded(swizzled: bool) -> Coded:
    """Rows that start at multiples of 16 bytes, their scales at words; ``swizzled``: in the 128x4 layout."""

    def rows(step: int, align: int) -> Any:
        return fake.tensor("u8", (None, None, None), (fake.dim(step), fake.dim(step), 1), align=align)

    return Coded(rows(16, 16), rows(4, 16 if swizzled else 4))
