"""What a norm solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """``w * y * rsqrt(mean(y^2) + eps) * silu(z)`` of rows of ``n`` elements."""

    device: torch.device
    y_dtype: torch.dtype
    dtype: torch.dtype  # of z and out
    w_dtype: torch.dtype
    n: int
    batch: tuple[int, ...]  # sizes of the axes before N
    y: tuple[int, ...]  # element strides of these axes
    z: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.batch)


class Operands(NamedTuple):
    """The tensors of one launch, and the one number."""

    y: torch.Tensor  # (..., N)
    z: torch.Tensor  # (..., N)
    w: torch.Tensor  # (N)
    eps: float
    out: torch.Tensor  # (..., N), contiguous


def merged_axes(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The fewest axes (size, step of each tensor) that step through the same addresses in the same order."""
    axes: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(outer == size * inner for outer, inner in zip(axes[-1][1:], steps, strict=True)):
            axes[-1] = (axes[-1][0] * size, *steps)
        else:
            axes.append((size, *steps))
    return axes or [(1, *(0 for _ in strides))]
