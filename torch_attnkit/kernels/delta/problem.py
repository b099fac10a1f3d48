"""What a launch of the gated delta rule solves, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class StepProblem:
    """A few tokens of each sequence, with gates and norms inside."""

    device: torch.device
    dtype: torch.dtype
    gate_dtypes: tuple[torch.dtype, torch.dtype]  # of A_log and dt_bias
    batch: int
    tokens: int  # of a sequence
    heads: int  # value heads
    key_heads: int
    dims: tuple[int, int]  # K of a key's head, V of a value's
    scale: float
    normalized: bool  # q and k have length 1 when they are used
    eps: float
    beta_scale: float
    accepted: bool  # whether there is such a tensor
    slots: int  # of the pool
    steps: tuple[int, ...]  # of q, k, v, a, b, state and state_index: elements along all axes but the last, of a, b and
    # state_index along it, too
    aligned: bool  # heads of q and k start at multiples of four elements
    state_aligned: bool  # and rows of the state

    @property
    def empty(self) -> bool:
        return self.batch * self.tokens * self.heads * self.dims[1] == 0


class StepOperands(NamedTuple):
    """The tensors of one launch."""

    q: torch.Tensor  # (B, n, Hk, K)
    k: torch.Tensor  # (B, n, Hk, K)
    v: torch.Tensor  # (B, n, Hv, V)
    a: torch.Tensor  # (B, n, Hv)
    b: torch.Tensor  # (B, n, Hv)
    a_log: torch.Tensor  # (Hv)
    dt_bias: torch.Tensor  # (Hv)
    state: torch.Tensor  # (Ns, Hv, V, K)
    state_index: torch.Tensor  # (B, n)
    accepted: torch.Tensor | None  # (B)
    out: torch.Tensor  # (B, n, Hv, V)
