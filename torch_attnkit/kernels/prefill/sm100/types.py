"""What a Blackwell prefill kernel is compiled for, and what its roles pass on."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100.exponentials import eighths

from ..types import Features, Scalars

ROWS = 128  # of a tile: the lanes of tensor memory
CTAS = 2  # of a pair, which computes one tile
LANES = ROWS // CTAS  # rows of the tile in one CTA; half a CTA's threads, for two threads have a row
HALF = 256  # columns of one product's output: tcgen05 takes no more
# A row's state: what is subtracted from its scores, which lags behind the maximum, its weights' sum, its true maximum.
ROW_MAX, ROW_SUM, TRUE_MAX = range(3)
STATES = 3


class Depths(NamedTuple):
    """Stages of shared memory's operands, and of the probabilities wherever they are."""

    q: int
    k: int
    v: int
    p: int


@dataclass(frozen=True, kw_only=True)
class Config(Features):
    """What is fixed at compile time; the base of ``OneCta`` and ``TwoCta``, which say how a tile is computed.

    ``tiles`` tiles of 128 rows are in flight in a CTA, two, or one whose scores then have two buffers. The rows are the
    queries of one head, or of ``group`` heads that share their keys, heads first. A block has ``tile_n`` keys.
    """

    tiles: int
    group: int
    stages: int
    pair: bool = False  # two CTAs, on neighbouring tiles of a head, load half of every block each, for both
    split: bool = False  # several CTAs have a split of a tile's keys each, see split.py
    fp8_kv: bool = False  # K and V are E4M3 beside queries of 16 bits, to which two warps widen them (widen.py)
    staged: int = 0  # stages of K and of V as they come then

    # What OneCta and TwoCta say.
    cta_group: ClassVar[tcgen05.CtaGroup]  # of the products
    p_source: ClassVar[tcgen05.OperandSource]  # where they find the probabilities
    tilers: ClassVar[tuple[tuple[int, int, int], tuple[int, int, int]]]  # of both: rows, columns and depth of a block
    depths: ClassVar[Depths]
    cluster: ClassVar[int]  # CTAs
    persistent: ClassVar[bool]  # whether a cluster computes several work tiles
    ahead: ClassVar[int]  # blocks by which the softmax may be ahead of the correction, a power of two
    # Columns of tensor memory: where the two buffers of scores and the outputs begin, and how many an output has.
    scores: ClassVar[tuple[int, int]]
    outputs: ClassVar[tuple[int, ...]]
    columns: ClassVar[int]

    @property
    def codes(self) -> bool:
        """Whether q, k, v and the probabilities are E4M3, and out is bf16."""
        return self.dtype.width == 8

    @property
    def p_in_smem(self) -> bool:
        """Whether the probabilities pass through shared memory."""
        return self.p_source is tcgen05.OperandSource.SMEM

    @property
    def rows(self) -> int:
        """Tokens that a CTA has in flight; those of a pair's tile with products of two CTAs."""
        return ROWS * self.tiles // self.group

    @property
    def ctas(self) -> int:
        """That work on the same keys; with products of two CTAs, how many pairs of these do."""
        return 2 if self.pair else 1

    @property
    def cluster_rows(self) -> int:
        """Tokens that a cluster has in flight."""
        return self.rows * self.ctas

    @property
    def eighths(self) -> int:
        """Of 8 exponentials, how many are polynomials."""
        return eighths(self.dim, self.dim_v, self.dtype.width)

    def nbytes(self, rows: int, elements: int) -> int:
        return rows * elements * self.dtype.width // 8

    # Warps: the softmax warpgroups of the tiles, the correction warpgroup, one warp for products and one for loads.
    @property
    def correction_warp(self) -> int:
        return 4 * self.tiles

    @property
    def mma_warp(self) -> int:
        return 4 * self.tiles + 4

    @property
    def load_warp(self) -> int:
        return 4 * self.tiles + 5

    @property
    def widen_warps(self) -> int:
        """Behind that of loads."""
        return 2 if self.fp8_kv else 0

    @property
    def threads(self) -> int:
        return 32 * (4 * self.tiles + 8)  # a whole warpgroup for the last two, as setmaxnreg asks


@dataclass(frozen=True, kw_only=True)
class OneCta(Config):
    """A CTA computes its tiles alone, with scores and probabilities in tensor memory."""

    cta_group = tcgen05.CtaGroup.ONE
    p_source = tcgen05.OperandSource.TMEM
    persistent = True

    @property
    def tilers(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (ROWS, self.tile_n, self.dim), (ROWS, self.dim_v, self.tile_n)

    @property
    def depths(self) -> Depths:
        return Depths(self.tiles, self.stages, self.stages, 1)

    @property
    def cluster(self) -> int:
        return self.ctas

    @property
    def ahead(self) -> int:
        return 2 if self.tiles == 2 else 4

    # Two buffers of scores, which the probabilities take over, then an output per tile.
    @property
    def scores(self) -> tuple[int, int]:
        return (0, self.tile_n)

    @property
    def outputs(self) -> tuple[int, ...]:
        first = 512 - self.tiles * self.dim_v
        return tuple(first + t * self.dim_v for t in range(self.tiles))

    @property
    def columns(self) -> int:
        return self.dim_v


def score_buffer(c: Config, t: int, n: Int32) -> tuple:
    """The buffer of scores of tile t's block n, and the phase of its barriers; n counts from the kernel's start."""
    if const_expr(c.tiles == 2):
        return t, n & 1
    return n & 1, (n >> 1) & 1


def factor_stage(c: Config, t: int, n: Int32) -> tuple:
    """Where tile t's softmax leaves its n-th factors, counted from the kernel's start, and the barrier's phase."""
    return t * c.ahead + (n & (c.ahead - 1)), (n >> (c.ahead.bit_length() - 1)) & 1


class Loads(NamedTuple):
    """The three TMA atoms and the tensors of coordinates that go with them."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B), or ((group, T), D, Hkv, B); packed sequences: without B
    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B); packed: (S, D, Hkv)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (Dv, S, Hkv, B); packed: (Dv, S, Hkv)


class Heads(NamedTuple):
    """A work tile's head of the tensors of coordinates, from its sequence's first token on."""

    q: cute.Tensor  # (T, D), or ((group, T), D)
    k: cute.Tensor  # (S, D)
    v: cute.Tensor  # (Dv, S)


class Mmas(NamedTuple):
    """The two products."""

    qk: cute.TiledMma
    pv: cute.TiledMma


class Layouts(NamedTuple):
    """Of shared memory, with stages last; ``p`` that of the probabilities, which may be in tensor memory."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    p: cute.ComposedLayout


class WorkTile(NamedTuple):
    """What the loading warp notes about the tiles that a cluster computes together."""

    row: Int32  # their number within the sequence; -1: there are none left
    head: Int32  # or KV head, where its group shares a tile
    batch: Int32
    q0: Int32  # this and what follows are the fields of Sequence
    tokens: Int32
    shift: Int32
    start: Int32
    end: Int32
    split: Int32  # of the tile's blocks
    num_splits: Int32


@dataclass
class Rings(Fixed):
    """The mbarriers: rings of work tiles and of K and V, and pairs of single ones.

    A part that computes tiles (``one_cta.py``, ``two_cta.py``) says how many stages they have and who arrives.
    """

    tile: Ring  # notes about work tiles
    k: Ring
    v: Ring
    q: Ring
    scores: Ring  # full: S is whole; empty: P is, and the output is ready for it
    factors: Ring  # full: a softmax group has left its factors or final states; empty is not used
    output: Ring  # full: a product with V is done (of two tiles: a tile's last one); empty is not used
    staged_k: Ring | None = None  # of E4M3 that is widened: as it comes
    staged_v: Ring | None = None


@dataclass
class SharedMemory(Fixed):
    """The plan of shared memory, in the order of its fields. Nothing overlaps.

    A product multiplies k numbers of each row at a time. ``TwoCta`` says what pieces and parts are.
    """

    rings: Rings
    sQ: cute.Tensor  # ((128, k), 1, D / k, tiles); two CTAs: ((64, k), 1, piece / k, pieces)
    sK: cute.Tensor  # ((N, k), 1, D / k, stages); two CTAs: ((64, k), 1, piece / k, stages)
    sV: cute.Tensor  # ((Dv, k), 1, N / k, stages); two CTAs: ((128, k), 1, part / k, stages)
    sP: cute.Tensor | None  # two CTAs alone: ((64, k), 1, part / k, parts)
    sTile: cute.Tensor  # (10, 2), Int32: the fields of WorkTile
    sFactors: cute.Tensor  # (128, ahead * tiles), what the output so far is to be multiplied by, of several blocks
    sMaxima: cute.Tensor | None  # two CTAs alone: (128, 2), the threads' maxima of two blocks
    sFinals: cute.Tensor  # (128, 3, 2 * tiles), a tile's last states, of two work tiles
    tmem_base: cute.Pointer  # the allocator of tensor memory writes there
    staged_k: cute.Tensor | None = None  # (N, D, staged) bytes of E4M3 that is widened
    staged_v: cute.Tensor | None = None  # the same with Dv


@dataclass
class TileRows(Fixed):
    """What a softmax thread has of a work tile."""

    scalars: Scalars  # of the tile's scores
    smem: SharedMemory
    warp: Int32
    tile: WorkTile
    position: Int32  # of its row in the sequence
    state: cute.Tensor  # (3), Float32: ROW_MAX, ROW_SUM, TRUE_MAX


def new_state() -> cute.Tensor:
    """(3), of a row."""
    return cute.make_rmem_tensor(STATES, Float32)


def element(at: int, upper: Any) -> Any:
    """Which element of its row stands in column ``at`` of the outputs, in lanes 0-63 or (``upper``, 0 or 1) 64-127."""
    product, column = divmod(at, HALF // 2)
    return product * HALF + upper * (HALF // 2) + column


@dataclass(frozen=True, kw_only=True)
class TwoCta(Config):
    """``stages`` counts pieces of K, and pieces of V, in shared memory: 16 KB each in either CTA.

    A piece of K is ``piece`` elements of a block's keys, of which each CTA holds one half; a piece of V is ``part`` of
    a block's keys by ``HALF`` columns, of which each CTA holds one half.
    ``pair`` means two pairs of CTAs, on neighbouring tiles of a head, whose CTAs load half of every piece each.
    """

    cta_group = tcgen05.CtaGroup.TWO
    p_source = tcgen05.OperandSource.SMEM
    ahead = 2  # block n's probabilities wait for block n - 1's product, before which its factors have been read

    @property
    def persistent(self) -> bool:
        """How many clusters of four a chip holds at a time is not known: each computes one work tile."""
        return not self.pair

    @property
    def piece(self) -> int:
        """Elements of the head dim in a piece of Q or K: 256 bytes."""
        return 2048 // self.dtype.width

    @property
    def part(self) -> int:
        """Keys in a piece of V or P: 128 bytes of P, which are swizzled together."""
        return 1024 // self.dtype.width

    @property
    def parts(self) -> int:
        """Of a block's keys."""
        return self.tile_n // self.part

    @property
    def tilers(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (ROWS, self.tile_n, self.piece), (ROWS, HALF, self.part)

    @property
    def depths(self) -> Depths:
        return Depths(self.k_pieces, self.stages, self.stages, self.parts)

    @property
    def cluster(self) -> int:
        return CTAS * self.ctas

    @property
    def k_pieces(self) -> int:
        """Of a block."""
        return self.dim // self.piece

    @property
    def halves(self) -> int:
        """Products that make up the output."""
        return self.dim_v // HALF

    @property
    def v_pieces(self) -> int:
        """Of a block."""
        return self.parts * self.halves

    # A product's first columns lie in lanes 0-63, its last ones in lanes 64-127.
    @property
    def scores(self) -> tuple[int, int]:
        return (0, self.tile_n // 2)

    @property
    def columns(self) -> int:
        return self.dim_v // 2

    @property
    def outputs(self) -> tuple[int, ...]:
        return (512 - self.columns,)
