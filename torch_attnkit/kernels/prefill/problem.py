"""What a prefill launch solves, in sizes and layouts, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..scores import Scores

Scales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Layout(NamedTuple):
    """Sizes and strides of a tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class Problem:
    """Attention of ``queries`` tokens over ``keys`` tokens, in each of ``batch`` sequences."""

    dtype: torch.dtype
    device: torch.device
    batch: int
    queries: int  # packed: of all sequences
    keys: int  # packed: likewise
    heads: int  # query heads of all KV heads
    kv_heads: int
    dim: int
    dim_v: int
    scores: Scores
    q: Layout  # as of Operands
    k: Layout
    v: Layout
    causal: bool
    normalize: bool = True  # else the results are numerators and row sums
    packed: bool = False  # sequences one after another, found by their offsets
    cached: bool = False  # keys and values are caches; a sequence's queries end where its keys do
    longest: int = 0  # queries that a sequence has at most
    sink: bool = False  # whether there are such tensors
    kv_len: bool = False
    kv_start: bool = False
    scales: tuple[bool, bool, bool] = (False, False, False)  # of q, k and v
    fp8_kv: bool = False  # keys and values are E4M3 beside queries of 16 bits

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // max(1, self.kv_heads)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of k and v."""
        return 1 if self.fp8_kv else self.dtype.itemsize

    @property
    def out_dtype(self) -> torch.dtype:
        """Of E4M3 inputs bf16: four bits are too few for a mean of values."""
        return self.dtype if self.dtype.itemsize > 1 else torch.bfloat16


class Operands(NamedTuple):
    """The tensors of one launch; None for those that a call does not have."""

    q: torch.Tensor  # (B, T, Hq, D); packed (T, Hq, D)
    k: torch.Tensor  # (B, S, Hkv, D); packed (S, Hkv, D); a cache (B, Hkv, S, D)
    v: torch.Tensor  # the same with Dv
    sink: torch.Tensor | None  # (Hq)
    kv_len: torch.Tensor | None  # (B)
    kv_start: torch.Tensor | None  # (B)
    cu_q: torch.Tensor | None  # (B + 1), packed alone
    cu_k: torch.Tensor | None
    scales: Scales  # of q, k and v, (B, Hkv)
    out: torch.Tensor  # (B, T, Hq, Dv); packed (T, Hq, Dv)
    lse: torch.Tensor  # (B, T, Hq); packed (T, Hq)
    row_sum: torch.Tensor | None  # like lse, unless normalised


@dataclass(frozen=True)
class PagedProblem:
    """Packed queries over ``pages`` pages of ``page`` keys each.

    Of ``attention``, k and v are the pages (Np, Ps, Hkv, D) and ``keys`` what a row of the block table has room for.
    """

    attention: Problem
    page: int
    pages: int
    longest_keys: int  # that a sequence has at most


class PagedOperands(NamedTuple):
    """The tensors of one launch over pages."""

    q: torch.Tensor  # (Tq, Hq, D)
    k: torch.Tensor  # (Np, Ps, Hkv, D)
    v: torch.Tensor  # (Np, Ps, Hkv, Dv)
    cu_q: torch.Tensor  # (B + 1)
    table: torch.Tensor  # (B, Mp)
    kv_len: torch.Tensor  # (B)
    sink: torch.Tensor | None  # (Hq)
    out: torch.Tensor  # (Tq, Hq, Dv)
    lse: torch.Tensor  # (Tq, Hq)
    scales: Scales  # of q, k and v, (B, Hkv) each
