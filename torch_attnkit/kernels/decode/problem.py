"""What a decode launch solves, in sizes and strides, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..scores import Scores

# (D, Dv) of MLA latents, projections absorbed, whose values are the first columns of its keys; they have rows of their
# own in the ops' tables. Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2.
LATENTS = ((576, 512),)

Scales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Strides(NamedTuple):
    """Element strides of one tensor: from sequence (or page) to the next, from token to token, from head to head."""

    sequence: int
    token: int
    head: int


@dataclass(frozen=True)
class Problem:
    """Attention of the last ``queries`` tokens of every sequence over its cache."""

    dtype: torch.dtype
    device: torch.device
    batch: int
    heads: int  # query heads of all KV heads
    kv_heads: int
    dim: int
    dim_v: int
    capacity: int  # keys of a sequence that the cache has room for
    scores: Scores
    q: Strides
    k: Strides
    v: Strides
    queries: int = 1
    causal: bool = True
    page: int = 0  # keys of a page; 0: the cache has none
    pages: int = 0
    table_row: int = 0  # elements from row to row of the block table
    sink: bool = False  # whether there are such tensors
    kv_start: bool = False
    scales: tuple[bool, bool, bool] = (False, False, False)  # of q, k and v
    fp8_kv: bool = False  # whether the caches are E4M3

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the caches."""
        return 1 if self.fp8_kv else self.dtype.itemsize

    @property
    def rows_of_cache(self) -> int:
        """Rows of K, over all heads."""
        return self.kv_heads * (self.pages * self.page if self.page else self.batch * self.capacity)


class Operands(NamedTuple):
    """The tensors of one launch; None for those that a call does not have."""

    q: torch.Tensor  # (B, Hq, D), of several queries (B, T, Hq, D)
    k: torch.Tensor  # (B, Hkv, S, D), or in pages (Np, Ps, Hkv, D)
    v: torch.Tensor  # the same with Dv
    table: torch.Tensor | None  # (B, Mp)
    kv_len: torch.Tensor  # (B)
    sink: torch.Tensor | None  # (Hq)
    kv_start: torch.Tensor | None  # (B)
    scales: Scales  # of q, k and v, (B, Hkv)
    out: torch.Tensor  # (B, Hq, Dv), of several queries (B, T, Hq, Dv)
    lse: torch.Tensor  # (B, Hq), (B, T, Hq)
