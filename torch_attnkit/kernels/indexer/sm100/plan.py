"""Launch planning of the Blackwell indexer: what its kernel accepts, and its shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem

# Elements of a head by format: rows of 64, 128 or 256 bytes; of MXFP4 128 elements, whose scales fill a word.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
MOST_HEADS = 128
MOST_TOKENS = 256  # of a CTA: their indices are in shared memory
ROWS = 128  # keys of a product: the lanes of tensor memory
TILES = 2  # of keys in a block, a warpgroup each
KEYS = TILES * ROWS
_STEP = 16  # columns of a product are multiples
_WIDE = 128  # columns of a product at most
_SWIZZLE = 128  # bytes of a row that are swizzled together
_TENSOR_COLUMNS = 512
_TILE_COLUMNS = 4  # of tensor memory: the scales of 128 rows of MXFP4
# Bytes of shared memory for keys and queries, with one CTA per SM and with two. With 32 accumulator columns a thread in
# registers, the register file would not hold two CTAs.
_SHARED, _HALF = 208 << 10, 104 << 10
_COLUMNS_PER_LOAD = {1: 32, 2: 16}
_MOST_STAGES = 8
_START = 2  # what a block's start takes, in tokens: as on an H200


@dataclass(frozen=True)
class Config:
    """``stored`` is the dtype of q and k, or "mxfp4"."""

    stored: str
    weights: str
    heads: int
    dim: int  # elements
    tokens_per_mma: int
    stages: int
    buffers: int  # of sums of each tile
    ids: bool
    paged: bool
    q_scale: bool  # float32
    k_scale: bool
    load: int  # bytes of a load of keys

    @property
    def blocks(self) -> int:
        """CTAs per SM: one loads while the other computes. Narrow key loads and q scales need more than half of the
        registers: with 64 heads they spilled 8 bytes."""
        fits = KEYS * self.row_bytes + self.stages * self.stage_bytes <= _HALF
        fits = fits and self.load >= 16 and not self.q_scale
        return 2 if fits and 2 * self.tensor_columns <= _TENSOR_COLUMNS else 1

    @property
    def columns_per_load(self) -> int:
        """Accumulator columns in a thread's registers."""
        return _COLUMNS_PER_LOAD[self.blocks]

    @property
    def four(self) -> bool:
        return self.stored == "mxfp4"

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, and of a head's query."""
        return row_bytes(self.stored, self.dim)

    @property
    def box_bytes(self) -> int:
        """Bytes of a row within one swizzle."""
        return min(self.row_bytes, _SWIZZLE)

    @property
    def boxes(self) -> int:
        return self.row_bytes // self.box_bytes

    @property
    def columns(self) -> int:
        """MMA columns of a token."""
        return columns(self.heads)

    @property
    def wide(self) -> int:
        """MMA columns."""
        return self.tokens_per_mma * self.columns

    @property
    def stage_bytes(self) -> int:
        """Bytes of an MMA's queries."""
        return self.wide * self.row_bytes

    @property
    def scale_columns(self) -> int:
        """Tensor-memory columns of MXFP4 scales: of the keys, and of each stage's queries."""
        return (TILES + self.stages) * _TILE_COLUMNS if self.four else 0

    @property
    def first_scales(self) -> int:
        """First tensor-memory column behind the accumulators."""
        return TILES * self.buffers * self.wide

    @property
    def tensor_columns(self) -> int:
        """Tensor-memory columns of a block, a power of two; half of all at most if two share an SM."""
        return max(32, 1 << (self.first_scales + self.scale_columns - 1).bit_length())

    @property
    def consumer_warps(self) -> int:
        return TILES * 4

    @property
    def threads(self) -> int:
        """Consumers, a producer warp, an MMA warp, and two that store -inf."""
        return 32 * (self.consumer_warps + 4)


def columns(heads: int) -> int:
    """Heads rounded up to MMA columns."""
    return -(-heads // _STEP) * _STEP


def row_bytes(stored: str, dim: int) -> int:
    return dim * {"mxfp4": 1, "f8e4m3": 2}.get(stored, 4) // 2


def shape(problem: Problem, stored: str) -> tuple[int, int, int]:
    """(tokens of an MMA, stages, accumulators of each tile).

    With two tokens an MMA reads the keys half as often. One token of a request, and MXFP4, whose
    scales take shared memory, have one. A CTA of one token has one MMA: two such CTAs share an SM, with half of tensor
    memory at most each."""
    p, many = problem, (problem.tokens if problem.ids else tokens_of_request(problem)) > 1
    wide, row = columns(p.heads), row_bytes(stored, p.dim)
    tokens_per_mma = 2 if many and stored != "mxfp4" and 2 * wide <= _WIDE else 1
    buffers = 2 if many and wide <= _WIDE // 2 else 1
    query_bytes = (_SHARED if many or wide > _WIDE // 2 else _HALF) - KEYS * row
    return tokens_per_mma, max(2, min(_MOST_STAGES, query_bytes // (tokens_per_mma * wide * row))), buffers


def streams(problem: Problem) -> bool:
    """No kernel of this architecture streams keys past queries."""
    return False


def tokens_of_request(problem: Problem) -> int:
    return problem.tokens // max(problem.requests, 1)


def tokens_of_block(problem: Problem, sms: int) -> int:
    """Tokens of a request per block: more save prologues, fewer balance SMs; the wave in flight counts as half a wave
    more."""
    tokens = problem.tokens if problem.ids else tokens_of_request(problem)
    tiles = -(-problem.entries // KEYS) * problem.requests

    def time(each: int) -> float:
        return (-(-tiles * -(-tokens // each) // sms) + 0.5) * (min(each, tokens) + _START)

    return min((MOST_TOKENS >> i for i in range(6)), key=time)
