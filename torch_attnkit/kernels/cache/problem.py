"""What is written to a cache or gathered from it: rows, rows with RoPE and heads of q, and pages; and the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_attnkit.core.memory import span
from torch_attnkit.formats import kv_cache


@dataclass(frozen=True)
class Row:
    """A row of D channels; encoded ``format`` keeps the last ``rope_dim`` in bfloat16."""

    format: str
    head_dim: int
    rope_dim: int

    @property
    def plain(self) -> bool:
        return self.format == "none"

    @property
    def size(self) -> int:
        """Elements of a cache row: values, or bytes of an encoded row."""
        return kv_cache.row_bytes(self.format, self.head_dim, self.rope_dim)

    @property
    def nope_dim(self) -> int:
        """Quantised channels (no RoPE)."""
        return self.head_dim - self.rope_dim

    @property
    def block(self) -> int:
        """Quantised channels that share a scale."""
        return kv_cache.BLOCK[self.format]

    @property
    def layout(self) -> kv_cache.RowLayout:
        """Byte offsets of the parts of an encoded row."""
        return kv_cache.row_layout(self.format, self.head_dim, self.rope_dim)


@dataclass(frozen=True)
class Problem:
    """Dense rows to cache rows, or back."""

    row: Row
    device: torch.device
    dtype: torch.dtype  # of the dense rows
    cache_dtype: torch.dtype
    slot_dtype: torch.dtype
    rows: int
    slots: int  # rows of the cache
    step: int  # elements from one dense row to the next, 0 if there is none
    cache_step: int  # the same of the cache
    global_scale: bool = False


class Operands(NamedTuple):
    """The tensors of one launch."""

    dense: torch.Tensor  # (R, D)
    cache: torch.Tensor  # (Nc, Rb)
    slot: torch.Tensor  # (R)
    global_scale: torch.Tensor | None  # ()


VECTOR = 8  # neighbouring channels, all of them rotated or none
MOST_CHANNELS = 1024  # of a head, which stays in the registers of a warp


@dataclass(frozen=True)
class RopeProblem:
    """Heads of q, normalised and rotated; keys, rotated and written to a cache."""

    keys: Problem  # dense rows to rows of a cache, one a token
    heads: int
    pairs: int  # of the last channels of heads and keys, rotated
    angle_dtype: torch.dtype
    q: tuple[int, ...]  # elements from one token and head to the next, 0 if there is none
    angles: tuple[int, ...]  # the same of the tokens of cos and sin


class RopeOperands(NamedTuple):
    """The tensors of one launch, and eps."""

    q: torch.Tensor  # (T, H, D)
    kv: torch.Tensor  # (T, D)
    cache: torch.Tensor  # (Nc, Rb)
    slot: torch.Tensor  # (T,)
    cos: torch.Tensor  # (T, R2)
    sin: torch.Tensor  # (T, R2)
    global_scale: torch.Tensor | None  # ()
    out: torch.Tensor  # (T, H, D), contiguous
    eps: float


@dataclass(frozen=True)
class Side:
    """Keys or values: heads of ``dim`` channels."""

    dim: int
    steps: tuple[int, ...]  # elements from one token to the next, and from one head
    cache_steps: tuple[int, ...]  # from one page to the next, from one key of a page, from one head
    scaled: bool


@dataclass(frozen=True)
class PagedProblem:
    """Tokens to slots of paged key and value caches."""

    sides: tuple[Side, ...]  # keys, values
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype  # the same, or E4M3
    slot_dtype: torch.dtype
    tokens: int
    heads: int
    pages: int
    page: int  # keys of one

    @property
    def empty(self) -> bool:
        return self.tokens * self.heads * self.pages * sum(side.dim for side in self.sides) == 0


class PagedOperands(NamedTuple):
    """The tensors of one paged launch."""

    key: torch.Tensor  # (R, Hkv, D)
    value: torch.Tensor  # (R, Hkv, Dv)
    k_cache: torch.Tensor  # (Np, Ps, Hkv, D)
    v_cache: torch.Tensor  # (Np, Ps, Hkv, Dv)
    slot: torch.Tensor  # (R,)
    k_scale: torch.Tensor | None  # (Hkv,)
    v_scale: torch.Tensor | None  # (Hkv,)


def without_overlap(o: PagedOperands) -> PagedOperands:
    """``o``, with copies of tokens that may overlap a cache, so that none is overwritten before it is read."""
    spans = [span(cache) for cache in (o.k_cache, o.v_cache)]

    def own(new: torch.Tensor) -> torch.Tensor:
        begin, end = span(new)
        return new.clone() if any(begin < last and first < end for first, last in spans) else new

    return o._replace(key=own(o.key), value=own(o.value))
