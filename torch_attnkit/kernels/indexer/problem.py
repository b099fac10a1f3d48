"""What an indexer scores and selects, in sizes and strides, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..prefill.problem import Layout


@dataclass(frozen=True)
class Problem:
    """Scores of ``entries`` keys of a request for each of its tokens: the weighted sum over heads of relu(q k).

    Requests have equally many tokens, in order, unless tokens name their request."""

    device: torch.device
    format: str  # "none", "fp8" or "mxfp4"
    dtype: torch.dtype  # of q and k
    weights: torch.dtype
    tokens: int
    requests: int
    entries: int
    heads: int
    dim: int  # elements of a head
    q: Layout
    q_scale_steps: tuple[int, ...]  # strides of the scales of q but the last
    k_steps: tuple[int, ...]  # strides of k but the last
    page: int  # entries of a page; without pages of a request
    ids: bool  # whether tokens name their request
    paged: bool
    q_scale: bool


class Operands(NamedTuple):
    """The tensors of one launch."""

    q: torch.Tensor  # (T, H, D), of MXFP4 D/2 bytes
    k: torch.Tensor  # (R, S, D), or in pages (P, Sp, D)
    weights: torch.Tensor  # (T, H)
    k_len: torch.Tensor  # (T) int32: entries that a token sees
    ids: torch.Tensor | None  # (T) int32
    table: torch.Tensor | None  # (R, M) int32
    q_scale: torch.Tensor | None  # (T, H, 1) float32, of MXFP4 (T, H, D/32) bytes
    k_scale: torch.Tensor | None  # as k, (.., .., 1) float32 or (.., .., D/32) bytes
    scores: torch.Tensor  # (T, S) float32, contiguous


@dataclass(frozen=True)
class Selection:
    """The ``topk`` entries of a request that each token's scores select."""

    scores: Problem
    topk: int


class SelectOperands(NamedTuple):
    """The tensors of one selection."""

    given: Operands  # with the indices in place of the scores
    indices: torch.Tensor  # (T, K) int32, contiguous
