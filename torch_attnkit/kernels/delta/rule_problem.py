"""What a launch of gated_delta_rule solves, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class RuleProblem:
    """Packed sequences of any length, with gates as they are used and norms inside."""

    device: torch.device
    dtype: torch.dtype
    beta_dtype: torch.dtype
    tokens: int  # of all sequences
    batch: int
    heads: int  # value heads
    key_heads: int
    dims: tuple[int, int]  # K of a key's head, V of a value's
    scale: float
    normalized: bool  # q and k have length 1 when they are used
    eps: float
    past: bool  # whether there is such a tensor
    slots: int  # of the pool
    steps: tuple[int, ...]  # of q, k and v: elements along all axes but the last
    state_steps: tuple[int, ...]
    small_steps: tuple[int, ...]  # of g, beta, cu_seqlens, state_index and past along all axes


class RuleOperands(NamedTuple):
    """The tensors of one launch."""

    q: torch.Tensor  # (Tq, Hk, K)
    k: torch.Tensor  # (Tq, Hk, K)
    v: torch.Tensor  # (Tq, Hv, V)
    g: torch.Tensor  # (Tq, Hv)
    beta: torch.Tensor  # (Tq, Hv)
    state: torch.Tensor  # (Ns, Hv, V, K)
    cu_seqlens: torch.Tensor  # (B + 1)
    state_index: torch.Tensor  # (B)
    past: torch.Tensor | None  # (B)
    out: torch.Tensor  # (Tq, Hv, V)
