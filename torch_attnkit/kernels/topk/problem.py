"""What a top-k solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """The indices of the ``topk`` largest scores of each row, in ascending order."""

    device: torch.device
    dtype: torch.dtype  # of the scores
    rows: int
    entries: int
    topk: int
    step: int  # elements from one row of scores to the next
    ragged: bool  # whether rows have lengths


class Operands(NamedTuple):
    """The tensors of one launch."""

    scores: torch.Tensor  # (T, S)
    length: torch.Tensor | None  # (T) int32: entries of a row that count; None: all
    indices: torch.Tensor  # (T, K) int32, contiguous
