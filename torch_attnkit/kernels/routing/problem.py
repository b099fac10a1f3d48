"""What a router solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Problem:
    """The ``topk`` experts of each row of logits with the largest keys, and their weights.

    ``scoring`` is "softmax", whose keys are the logits, or "sqrt_softplus", whose keys are the scores plus the bias.
    """

    device: torch.device
    dtype: torch.dtype  # of the logits
    scoring: str
    rows: int
    experts: int
    topk: int
    step: int  # elements from one row of logits to the next
    bias: bool
    over_all: bool  # softmax: over all experts, not over the chosen
    renormalize: bool


class Operands(NamedTuple):
    """The tensors of one launch, and the factor of the weights."""

    logits: torch.Tensor  # (R, E)
    bias: torch.Tensor | None  # (E) float32
    weights: torch.Tensor  # (R, K) float32, contiguous
    indices: torch.Tensor  # (R, K) int32, contiguous
    scale: float


@dataclass(frozen=True)
class TableProblem:
    """The experts that a table names for each token id, weighted by sqrt(softplus(logit))."""

    device: torch.device
    dtype: torch.dtype  # of the logits
    id_dtype: torch.dtype
    table_dtype: torch.dtype
    rows: int
    topk: int
    renormalize: bool


class TableOperands(NamedTuple):
    """The tensors of one launch, and the factor of the weights."""

    logits: torch.Tensor  # (R, E)
    token_ids: torch.Tensor  # (R)
    table: torch.Tensor  # (V, K)
    weights: torch.Tensor  # (R, K) float32, contiguous
    indices: torch.Tensor  # (R, K) int32, contiguous
    scale: float
