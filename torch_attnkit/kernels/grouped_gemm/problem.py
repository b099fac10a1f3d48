"""What routed experts solve, in sizes and strides, and the tensors that they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

LINEAR, CONTIGUOUS, PADDED = range(3)  # scales: linear, or 128x4 in rows one after another or further apart
BLOCK = {"nvfp4": 16, "mxfp4": 32}  # elements of a row under one scale
SPAN = 128  # elements of a row that a quad of lanes decodes at a time, 32 each: 16 bytes
STRADDLING = 0  # rows of scales follow each other, and every other one begins in the middle of a word
BULK_ROWS = -1  # the same, and those of a work tile come to shared memory by one copy or two
ALIGNMENT = {STRADDLING: 4, BULK_ROWS: 16}  # of scales, in bytes; otherwise that of a load
WARP_SLOTS = 64  # choices of experts at most that every block sorts for itself, by a warp
MOST_EXPERTS = 1 << 15  # whose counts one block keeps in shared memory
_LEAST_EXPERTS = 1 << 10


def experts_compiled(experts: int) -> int:
    """What a kernel is compiled for that has so many: a power of two, so that few are compiled."""
    return max(_LEAST_EXPERTS, 1 << (experts - 1).bit_length())


@dataclass(frozen=True)
class Weights:
    """Matrices of E experts, two elements a byte, with a scale for every ``BLOCK`` elements of a row."""

    rows: int
    columns: int  # elements of a row, along which is summed
    expert: int  # bytes from an expert to the next
    row: int  # bytes from a row to the next
    scale_expert: int
    scale_row: int
    scale_columns: int  # bytes of a row


@dataclass(frozen=True)
class Problem:
    """``sum_k weights[t, k] * (w2[e] swiglu(w13[e] x[t] + bias13[e]) + bias2[e])`` for e = indices[t, k].

    Every tensor's last axis is contiguous; what stands here of the others are steps of their axes.
    """

    device: torch.device
    dtype: torch.dtype
    index_dtype: torch.dtype
    tokens: int
    top_k: int
    experts: int
    up: Weights  # w13: gate and up rows
    down: Weights  # w2
    format: str
    activations: str
    swiglu: str
    alpha: float
    limit: float | None
    interleaved: bool
    scale_layout: str

    @property
    def slots(self) -> int:
        """Choices of all tokens."""
        return self.tokens * self.top_k

    @property
    def hidden(self) -> int:
        return self.up.columns

    @property
    def intermediate(self) -> int:
        return self.down.columns


class Operands(NamedTuple):
    """The tensors of one launch."""

    x: torch.Tensor  # (Tq, N)
    weights: torch.Tensor  # (Tq, K)
    indices: torch.Tensor  # (Tq, K)
    w13: torch.Tensor  # (E, 2 M, N/2)
    w13_scale: torch.Tensor
    w2: torch.Tensor  # (E, N, M/2)
    w2_scale: torch.Tensor
    w13_global: torch.Tensor | None  # (E)
    w2_global: torch.Tensor | None
    bias13: torch.Tensor | None  # (E, 2 M)
    bias2: torch.Tensor | None  # (E, N)
    x_global: torch.Tensor | None  # ()
    h_global: torch.Tensor | None
    out: torch.Tensor  # (Tq, N)
