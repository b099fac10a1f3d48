"""What is written to the rows of a cache or gathered from them, and the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_attnkit.formats import kv_cache


@dataclass(frozen=True)
class Row:
    """A row: D channels, of which an encoded ``format`` keeps the last ``rope_dim`` in bfloat16."""

    format: str
    head_dim: int
    rope_dim: int

    @property
    def plain(self) -> bool:
        return self.format == "none"

    @property
    def size(self) -> int:
        """Elements of a row of the cache: numbers, or bytes of an encoded row."""
        return kv_cache.row_bytes(self.format, self.head_dim, self.rope_dim)

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def block(self) -> int:
        """NoPE channels under one scale."""
        return kv_cache.BLOCK[self.format]

    @property
    def layout(self) -> kv_cache.RowLayout:
        """Where the parts of an encoded row lie."""
        return kv_cache.row_layout(self.format, self.head_dim, self.rope_dim)


@dataclass(frozen=True)
class Problem:
    """Rows of numbers to rows of a cache, or back."""

    row: Row
    device: torch.device
    dtype: torch.dtype  # of the numbers outside the cache
    cache_dtype: torch.dtype
    slot_dtype: torch.dtype
    rows: int
    slots: int  # rows of the cache
    step: int  # elements from one row of numbers to the next, 0 if there is none
    cache_step: int  # the same of the cache
    global_scale: bool = False


class Operands(NamedTuple):
    """The tensors of one launch."""

    numbers: torch.Tensor  # (R, D)
    cache: torch.Tensor  # (Nc, Rb)
    slot: torch.Tensor  # (R)
    global_scale: torch.Tensor | None  # ()
