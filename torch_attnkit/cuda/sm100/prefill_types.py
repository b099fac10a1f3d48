"""What a Blackwell prefill kernel is compiled for, and what its roles pass on. Imports cutlass."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ..prefill_types import Features
from .exponentials import eighths

ROWS = 128  # of a tile: the lanes of tensor memory


class Depths(NamedTuple):
    """Stages of shared memory's operands, and of the probabilities wherever they are."""

    q: int
    k: int
    v: int
    p: int


@dataclass(frozen=True, kw_only=True)
class Config(Features):
    """What is fixed at compile time.

    ``tiles`` tiles of 128 rows are in flight in a CTA, two, or one whose scores then have two buffers. The rows are the
    queries of one head, or of ``group`` heads that share their keys, heads first. A block has ``tile_n`` keys.
    """

    tiles: int
    group: int
    stages: int
    pair: bool = False  # two CTAs, on neighbouring tiles of a head, load half of every block each, for both
    split: bool = False  # the keys of a tile are shared by several CTAs, see multi.py

    cta_group = tcgen05.CtaGroup.ONE  # of the products
    weights_from = tcgen05.OperandSource.TMEM  # where the products find the probabilities
    staged = 3  # operands in shared memory: the first of Layouts

    @property
    def tilers(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Rows, columns and depth of a block of each of the two products."""
        return (ROWS, self.tile_n, self.dim), (ROWS, self.dim_v, self.tile_n)

    @property
    def depths(self) -> Depths:
        return Depths(self.tiles, self.stages, self.stages, 1)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.ctas

    @property
    def codes(self) -> bool:
        """Whether q, k, v and the probabilities are E4M3, and out is bf16."""
        return self.dtype.width == 8

    @property
    def rows(self) -> int:
        """Tokens that a CTA has in flight."""
        return ROWS * self.tiles // self.group

    @property
    def ctas(self) -> int:
        """That work on the same keys; with products of two CTAs, how many pairs of these do."""
        return 2 if self.pair else 1

    @property
    def eighths(self) -> int:
        """Of 8 exponentials, how many are polynomials."""
        return eighths(self.dim, self.dim_v, self.dtype.width)

    @property
    def turns(self) -> int:
        """Blocks by which a softmax group may be ahead of the correction, as a power of two."""
        return 2 if self.tiles == 2 else 4

    # Tensor memory, in columns: two buffers of scores, which the probabilities take over, then an output per tile.
    @property
    def scores(self) -> tuple[int, int]:
        return (0, self.tile_n)

    @property
    def columns(self) -> int:
        """Of an output."""
        return self.dim_v

    @property
    def outputs(self) -> tuple[int, ...]:
        first = 512 - self.tiles * self.dim_v
        return tuple(first + t * self.dim_v for t in range(self.tiles))

    # Warps: the softmax warpgroups of the tiles, the correction warpgroup, one warp for products and one for loads.
    @property
    def correction_warp(self) -> int:
        return 4 * self.tiles

    @property
    def product_warp(self) -> int:
        return 4 * self.tiles + 4

    @property
    def load_warp(self) -> int:
        return 4 * self.tiles + 5

    @property
    def threads(self) -> int:
        return 32 * (4 * self.tiles + 8)  # a whole warpgroup for the last two, as setmaxnreg asks


class Loads(NamedTuple):
    """The three TMA atoms and the tensors of coordinates that go with them."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B), or ((group, T), D, Hkv, B); packed sequences: without B
    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B); packed: (S, D, Hkv)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (Dv, S, Hkv, B); packed: (Dv, S, Hkv)


class Products(NamedTuple):
    qk: cute.TiledMma
    pv: cute.TiledMma


class Layouts(NamedTuple):
    """Of shared memory, with stages last; ``p`` that of the probabilities, which may be in tensor memory."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    p: cute.ComposedLayout


class Tile(NamedTuple):
    """What the loading warp notes about a turn's tiles; ``row`` counts in tokens of a turn, -1: no more turns."""

    row: Int32
    head: Int32  # or KV head, where its group shares a tile
    batch: Int32
    q0: Int32
    tokens: Int32
    shift: Int32
    start: Int32
    end: Int32
    part: Int32  # of the tile's blocks, in ``parts``
    parts: Int32
