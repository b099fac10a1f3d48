"""What a launch of causal_conv1d solves, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

WIDTHS = (2, 3, 4)  # tokens of a sum
MOST_COLUMNS = 12  # of a state
ACTIVATIONS = ("silu", "none")
RUN = 16  # tokens that a thread has in flight
VECTOR = 4  # channels of a thread
THREADS = 128
MOST_RUNS = 256  # CTAs of a sequence and its channels


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
    def runs(self) -> int:
        """CTAs that share a sequence's runs of tokens, were all sequences as long."""
        return max(1, min(MOST_RUNS, -(-self.tokens // (RUN * max(self.batch, 1)))))


class ConvOperands(NamedTuple):
    """The tensors of one launch."""

    x: torch.Tensor  # (Tq, C)
    weight: torch.Tensor  # (C, W)
    conv_state: torch.Tensor  # (Ns, C, Ws)
    cu_seqlens: torch.Tensor  # (B + 1)
    state_index: torch.Tensor  # (B)
    bias: torch.Tensor | None  # (C)
    past: torch.Tensor | None  # (B)
    out: torch.Tensor  # (Tq, C)
