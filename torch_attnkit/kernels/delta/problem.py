"""What launches of the gated delta rule, and of the convolution ahead of it, solve and are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

VECTOR = 4  # elements of q, k and the state that a lane loads at once
WIDTHS = (2, 3, 4)  # tokens of a sum of the convolution
MOST_COLUMNS = 12  # tokens of a state of it
ACTIVATIONS = ("silu", "none")
_RUNS = (4, 16)  # tokens of the convolution that a thread has in flight, of steps and of prompts; no fewer than W - 1
_MOST_RUNS = 256  # CTAs of a sequence and its channels


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
    channels: bool = False  # a channel of K has a gate of its own, not a head
    lower_bound: float | None = None  # of such gates; None has none

    @property
    def empty(self) -> bool:
        return self.batch * self.tokens * self.heads * self.dims[1] == 0

    @property
    def gate_scalar(self) -> float:
        """What gates take besides: of a head beta_scale, of bounded channels the bound."""
        return self.beta_scale if self.lower_bound is None else self.lower_bound


class StepOperands(NamedTuple):
    """The tensors of one launch."""

    q: torch.Tensor  # (B, n, Hk, K)
    k: torch.Tensor  # (B, n, Hk, K)
    v: torch.Tensor  # (B, n, Hv, V)
    a: torch.Tensor  # (B, n, Hv), with gates of channels (B, n, Hv, K)
    b: torch.Tensor  # (B, n, Hv)
    a_log: torch.Tensor  # (Hv)
    dt_bias: torch.Tensor  # (Hv), with gates of channels (Hv, K)
    state: torch.Tensor  # (Ns, Hv, V, K)
    state_index: torch.Tensor  # (B, n)
    accepted: torch.Tensor | None  # (B)
    out: torch.Tensor  # (B, n, Hv, V)


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

    @property
    def empty(self) -> bool:
        return self.tokens * self.heads * self.dims[1] == 0


class RuleOperands(NamedTuple):
    """Its tensors."""

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


@dataclass(frozen=True)
class ConvProblem:
    """A depthwise convolution over packed sequences with states in slots."""

    device: torch.device
    dtype: torch.dtype
    tokens: int  # of all sequences
    batch: int
    channels: int
    width: int  # tokens of a sum
    columns: int  # tokens of a state
    slots: int
    bias: bool
    past: bool
    silu: bool
    steps: tuple[int, ...]  # of x, weight, conv_state, cu_seqlens and state_index along all axes
    past_step: int
    bias_step: int

    @property
    def empty(self) -> bool:
        return self.tokens * self.channels == 0

    @property
    def run(self) -> int:
        """Tokens of a run, were all sequences as long."""
        return next((run for run in _RUNS if self.tokens <= run * self.batch), _RUNS[-1])

    @property
    def short(self) -> bool:
        """Steps: sequences have a run each, were all as long."""
        return self.run == _RUNS[0]

    @property
    def runs(self) -> int:
        """CTAs that share a sequence's runs, were all sequences as long."""
        return max(1, min(_MOST_RUNS, -(-self.tokens // (self.run * max(self.batch, 1)))))


class ConvOperands(NamedTuple):
    """Its tensors."""

    x: torch.Tensor  # (Tq, C)
    weight: torch.Tensor  # (C, W)
    conv_state: torch.Tensor  # (Ns, C, Ws)
    cu_seqlens: torch.Tensor  # (B + 1)
    state_index: torch.Tensor  # (B)
    bias: torch.Tensor | None  # (C)
    past: torch.Tensor | None  # (B)
    out: torch.Tensor  # (Tq, C)
