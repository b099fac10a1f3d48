"""Batched GEMM, in sizes and strides, and the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """``out[t, g] = weight[g] @ x[t, g]`` for T tokens of G groups: K elements each to N."""

    device: torch.device
    dtype: torch.dtype  # of x and of the weights
    out_dtype: torch.dtype
    tokens: int
    groups: int
    k: int
    n: int
    x: tuple[int, ...]  # element strides of its axes before K, 0 for an axis of one
    weight: tuple[int, ...]


@dataclass(frozen=True)
class Fp4Problem:
    """The same of FP4 elements, with a scale for every block of K of either side."""

    device: torch.device
    format: str  # nvfp4 or mxfp4
    scale_layout: str
    divisors: tuple[bool, bool]  # which of x and the weights have a global scale
    out_dtype: torch.dtype
    tokens: int
    groups: int
    k: int
    n: int
    x: tuple[int, ...]  # bytes from one to the next along its axes before K, 0 for an axis of one
    weight: tuple[int, ...]
    weight_scale: tuple[int, ...]


class Operands(NamedTuple):
    """The tensors of one launch. FP4 elements are pairs in bytes; their scales are linear as x and the weights are, or
    each group's in the 128x4 layout."""

    x: torch.Tensor  # (T, G, K)
    weight: torch.Tensor  # (G, N, K)
    out: torch.Tensor  # (T, G, N), contiguous
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    x_global: torch.Tensor | None = None  # ()
    weight_global: torch.Tensor | None = None
