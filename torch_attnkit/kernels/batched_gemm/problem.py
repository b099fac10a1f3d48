"""Products of groups, in sizes and strides, and the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """``out[t, g] = weight[g] @ x[t, g]`` for T tokens of G groups: K numbers each to N."""

    device: torch.device
    dtype: torch.dtype  # of x and of the weights
    out_dtype: torch.dtype
    tokens: int
    groups: int
    k: int
    n: int
    x: tuple[int, ...]  # element strides of its axes before K, 0 for an axis of one
    weight: tuple[int, ...]


class Operands(NamedTuple):
    """The tensors of one launch."""

    x: torch.Tensor  # (T, G, K)
    weight: torch.Tensor  # (G, N, K)
    out: torch.Tensor  # (T, G, N), contiguous
