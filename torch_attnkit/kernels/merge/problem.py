"""What a merge solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """``parts`` partial results for each of ``rows`` x ``heads`` rows of ``dim_v`` elements."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    parts: int
    rows: int
    heads: int
    dim_v: int
    part: tuple[int, ...]  # element strides of the tensors (P, R, H, ...)
    lse: tuple[int, ...]
    row_sum: tuple[int, ...] | None = None  # None: the partials are normalised
    sink: bool = False


class Operands(NamedTuple):
    """The tensors of one launch."""

    part: torch.Tensor  # (P, R, H, Dv)
    lse_part: torch.Tensor  # (P, R, H)
    sink: torch.Tensor | None  # (H)
    row_sum: torch.Tensor | None  # (P, R, H)
    out: torch.Tensor  # (R, H, Dv)
    lse: torch.Tensor  # (R, H)
