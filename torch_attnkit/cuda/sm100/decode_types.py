"""What the Blackwell decode kernel for many heads is compiled for, and what its roles pass on. Imports cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

KEYS = 128  # of a tile: the rows of its scores, the lanes of tensor memory
ROWS = 2 * KEYS  # threads that have scores


@dataclass(frozen=True)
class TallConfig:
    """What is fixed at compile time. D and Dv are equal, 64 or a multiple of 128; ``page``: keys of a page, or 0.

    A tile of keys lies in shared memory as ``parts`` buffers of the ring, each with ``part`` columns of all its keys;
    so does a tile of values, unless V is K (``same``). Elements are bf16, fp16 or E4M3, of which P is one, too.
    """

    dtype: Any
    dim: int
    heads: int  # query heads of a CTA: 16, 32 or 64; fewer are padded
    sides: int  # CTAs that share keys, each with other heads: 1 or 2
    stages: int
    page: int = 0
    same: bool = False
    scales: tuple[bool, ...] = ()  # which of q's, k's and v's there are; (): none

    beside = False  # ``Scalars.beside`` is always 1

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.width // 8

    @property
    def codes(self) -> bool:
        """Whether elements are E4M3; out is bf16 then."""
        return self.size == 1

    @property
    def dim_v(self) -> int:
        return self.dim

    @property
    def part(self) -> int:
        """Columns of a buffer, which are the rows of a product with V'."""
        return min(self.dim, KEYS)

    @property
    def parts(self) -> int:
        return self.dim // self.part

    @property
    def fills(self) -> int:
        """Buffers that a tile fills, of K and V together."""
        return self.parts * (1 if self.same else 2)

    @property
    def columns(self) -> int:
        """Of a box: up to 128 bytes of a row, which is as wide as a swizzle can be."""
        return min(self.part, 128 // self.size)

    @property
    def row_bytes(self) -> int:
        """Of a box: the distance of its rows in shared memory, and the width of their swizzle."""
        return self.columns * self.size

    @property
    def ahead(self) -> bool:
        """Whether the scores of a tile are made before the output of the tile before, under whose softmax they run:
        K's buffers are free as soon as the scores are there, but where V is K both tiles must fit."""
        return not self.same or self.stages >= 2 * self.parts

    @property
    def box(self) -> int:
        """Keys of a box: what a CTA loads of a tile, or as much of that as lies in one page."""
        return gcd(self.page, KEYS // self.sides) if self.page else KEYS // self.sides

    @property
    def boxes(self) -> int:
        """Of a tile, by keys."""
        return KEYS // self.box

    # Tensor memory, in columns: two buffers of scores, then the output, ``part`` rows of O' in ``heads`` columns each.
    @property
    def output(self) -> int:
        return 2 * self.heads

    # Warps: two warpgroups for the softmax, one warp for products, one for loads.
    product_warp, load_warp = 8, 9
    threads = ROWS + 64

    @property
    def own(self) -> int:
        """Heads of a softmax warpgroup."""
        return self.heads // 2

    @property
    def query_bytes(self) -> int:
        return self.heads * self.dim * self.size

    @property
    def weights_bytes(self) -> int:
        return self.heads * KEYS * self.size

    @property
    def buffer_bytes(self) -> int:
        return KEYS * self.part * self.size

    @property
    def result_bytes(self) -> int:
        """What takes the ring's place when a piece is through: O, fp32."""
        return self.heads * self.dim * 4

    @property
    def shared_bytes(self) -> int:
        """Of the large tensors; statistics and barriers take less than 4 KB more."""
        return self.query_bytes + self.weights_bytes + max(self.stages * self.buffer_bytes, self.result_bytes)

    @property
    def part_floats(self) -> int:
        """Floats of a partial result in the workspace: the output, then a maximum and a sum per head."""
        return self.heads * (self.dim + 2)


class Loads(NamedTuple):
    """The TMA atoms and the tensors of coordinates that go with them; ``v`` is not used where V is K."""

    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B), or over pages (Ps, D, Hkv, Np)
    v_atom: cute.CopyAtom
    v: cute.Tensor


class Products(NamedTuple):
    scores: cute.TiledMma
    output: cute.TiledMma


class Layouts(NamedTuple):
    """Of shared memory, stages last. K, V and the boxes of a load are the same bytes."""

    q: cute.ComposedLayout  # ((N, K), 1, part / K, parts), where K is 32 bytes
    k: cute.ComposedLayout  # ((128, K), 1, part / K, stages)
    v: cute.ComposedLayout  # ((part, K), 1, 128 / K, stages)
    p: cute.ComposedLayout  # ((N, K), 1, 128 / K, 1)
    boxes: cute.ComposedLayout  # (box, columns, boxes of all stages)


class Work(NamedTuple):
    """A piece as one CTA sees it: ``tiles`` tiles of its group, every ``step``-th from ``first`` on."""

    b: Int32
    kv_head: Int32
    head: Int32  # of the CTA's heads the first
    heads: Int32  # of them, none where the group is narrower than the cluster's heads
    first: Int32
    step: Int32
    tiles: Int32
    row: Int32  # the first of the CTA's heads that the CTA merges
    rows: Int32  # of them


class Site(NamedTuple):
    """Where a CTA stands: its heads and its share of the keys, of ``splits``; and how the work is cut (``Share``)."""

    side: Int32
    split: Int32
    splits: Int32
    rank: Int32  # in the cluster
    cluster: Int32
    clusters: Int32
    total: Int32
    blocks: Int32
    each: Int32
    extra: Int32


class Turn(NamedTuple):
    """Where the loop over pieces goes on, and what of the piece that ends is needed then."""

    at: Int32
    stop: Int32
    before: Int32
    sequence: Int32
    n: Int32
    pieces: Int32
    odd: Int32
    whole: Int32
    start: Int32
    tiles: Int32
