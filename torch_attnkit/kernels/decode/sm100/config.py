"""What the Blackwell decode kernel for many heads is compiled for, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import gcd
from typing import Any

from torch_attnkit.cuda.smem import Region, itemsize
from torch_attnkit.cuda.workspace import SplitLayout

KEYS = 128  # of a tile: the rows of its scores, the lanes of tensor memory
SOFTMAX_THREADS = 2 * KEYS  # two warpgroups
PRODUCT_WARP, LOAD_WARP = 8, 9  # behind those of the softmax
THREADS = SOFTMAX_THREADS + 64
CLUSTER = 8  # most CTAs of one, which every GPU can place


class NamedBarrier(IntEnum):
    """Of a CTA; 0 is that of all threads."""

    SOFTMAX = 1


@dataclass(frozen=True)
class Tcgen05Shared:
    """The large tensors in the shared memory of a CTA; statistics and barriers take less than 4 KB more."""

    query: Region
    probabilities: Region
    ring: Region  # (stages, keys, columns)
    results: Region  # over the ring, when a work tile is through: O (heads, Dv), fp32
    nbytes: int


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory: two buffers of S' in ``heads`` columns each, then O', ``parts`` times as many."""

    heads: int
    parts: int

    def scores(self, buffer: Any) -> Any:
        return buffer * self.heads

    @property
    def output(self) -> int:
        return 2 * self.heads

    @property
    def columns(self) -> int:
        return self.output + self.parts * self.heads


@dataclass(frozen=True)
class Tcgen05Config:
    """What is fixed at compile time. Dv is 64 or a multiple of 128, D the same or more; ``page``: keys of a page, or 0.

    A tile of keys lies in shared memory as ``parts`` stages of the ring, each with ``part`` columns of all its keys; so
    does a tile of values as ``value_parts``, unless V is K, or K's first columns (``same``). Columns that the last part
    of K has beyond D are zeros, and so are Q's. Elements are bf16, fp16 or E4M3, of which P is one, too.
    """

    dtype: Any
    dim: int
    dim_v: int
    heads: int  # query heads of a CTA: 16, 32 or 64; fewer are padded
    sides: int  # CTAs that share keys, each with other heads: 1, 2 or 4
    stages: int
    page: int = 0
    same: bool = False
    scales: tuple[bool, ...] = ()  # which of q's, k's and v's there are; (): none

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def fp8(self) -> bool:
        """Whether elements are E4M3; out is bf16 then."""
        return self.itemsize == 1

    @property
    def part(self) -> int:
        """Columns of a stage, which are the rows of a product with V'."""
        return min(self.dim_v, KEYS)

    @property
    def parts(self) -> int:
        return -(-self.dim // self.part)

    @property
    def value_parts(self) -> int:
        return self.dim_v // self.part

    @property
    def width(self) -> int:
        """Columns of Q and K in shared memory."""
        return self.parts * self.part

    @property
    def fills(self) -> int:
        """Stages that a tile fills, of K and V together."""
        return self.parts + (0 if self.same else self.value_parts)

    @property
    def columns(self) -> int:
        """Of a box: up to 128 bytes of a row, which is as wide as a swizzle can be."""
        return min(self.part, 128 // self.itemsize)

    @property
    def row_bytes(self) -> int:
        """Of a box: the distance of its rows in shared memory, and the width of their swizzle."""
        return self.columns * self.itemsize

    @property
    def ahead(self) -> bool:
        """Whether the scores of a tile are made before the output of the tile before, under whose softmax they run:
        K's stages are free as soon as the scores are there, but where V is K both tiles must fit."""
        return not self.same or self.stages >= 2 * self.parts

    @property
    def box(self) -> int:
        """Keys of a box: what a CTA loads of a tile, or as much of that as lies in one page."""
        return gcd(self.page, KEYS // self.sides) if self.page else KEYS // self.sides

    @property
    def boxes(self) -> int:
        """Of a tile, by keys."""
        return KEYS // self.box

    @property
    def own(self) -> int:
        """Heads of a softmax warpgroup."""
        return self.heads // 2

    @property
    def stage_bytes(self) -> int:
        return KEYS * self.part * self.itemsize

    @cached_property
    def shared(self) -> Tcgen05Shared:
        query = Region(0, self.heads * self.width * self.itemsize)
        probabilities = Region(query.end, self.heads * KEYS * self.itemsize)
        ring = Region(probabilities.end, self.stages * self.stage_bytes)
        results = Region(ring.offset, self.heads * self.dim_v * 4)
        return Tcgen05Shared(query, probabilities, ring, results, max(ring.end, results.end))

    @cached_property
    def tensor_memory(self) -> TensorMemory:
        return TensorMemory(self.heads, self.value_parts)

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim_v)
