"""What the backward of a gated norm solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """Gradients of ``w * y * rsqrt(mean(y^2) + eps) * silu(z)``, of rows of ``n`` elements."""

    device: torch.device
    n: int
    batch: tuple[int, ...]  # sizes of the axes before N
    y_dtype: torch.dtype  # of y and dy
    dtype: torch.dtype  # of grad, z and dz
    w_dtype: torch.dtype  # of w and dw
    grad: tuple[int, ...]  # element strides of these axes
    y: tuple[int, ...]
    z: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.batch)


class Operands(NamedTuple):
    """The tensors of one launch, and the one number."""

    grad: torch.Tensor  # (..., N)
    y: torch.Tensor  # (..., N)
    z: torch.Tensor  # (..., N)
    w: torch.Tensor  # (N)
    eps: float
    dy: torch.Tensor  # (..., N), contiguous
    dz: torch.Tensor  # (..., N), contiguous
    dw: torch.Tensor  # (N)


def nothing(operands: Operands) -> None:
    """Without rows there is a sum of nothing."""
    operands.dw.zero_()
