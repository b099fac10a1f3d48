"""Keys and values of tokens to slots of pages: the problem, its tensors, and how wide vectors may be. No cutlass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_attnkit.core.memory import span

VECTOR = 16  # bytes of the widest loads and stores
MOST_THREADS = 256


@dataclass(frozen=True)
class Side:
    """Keys or values: heads of ``dim`` numbers."""

    dim: int
    steps: tuple[int, ...]  # elements from one token to the next, and from one head
    cache_steps: tuple[int, ...]  # from one page to the next, from one key of a page, from one head
    scaled: bool


@dataclass(frozen=True)
class Problem:
    """Tokens to slots of two caches of pages."""

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


class Operands(NamedTuple):
    """The tensors of one launch."""

    key: torch.Tensor  # (R, Hkv, D)
    value: torch.Tensor  # (R, Hkv, Dv)
    k_cache: torch.Tensor  # (Np, Ps, Hkv, D)
    v_cache: torch.Tensor  # (Np, Ps, Hkv, Dv)
    slot: torch.Tensor  # (R,)
    k_scale: torch.Tensor | None  # (Hkv,)
    v_scale: torch.Tensor | None  # (Hkv,)


def width(p: Problem) -> int:
    """Elements of the widest vectors of both sides that sizes and strides allow, at most 16 bytes of tokens."""
    steps = (step for side in p.sides for step in (side.dim, *side.steps, *side.cache_steps))
    every = math.gcd(VECTOR // p.dtype.itemsize, *steps)
    return every & -every


def apart(o: Operands) -> Operands:
    """``o``, with copies of tokens that may share memory with a cache: none is overwritten before it is read."""
    spans = [span(cache) for cache in (o.k_cache, o.v_cache)]

    def own(new: torch.Tensor) -> torch.Tensor:
        begin, end = span(new)
        return new.clone() if any(begin < last and first < end for first, last in spans) else new

    return o._replace(key=own(o.key), value=own(o.value))
