"""The indexer's scores on Blackwell: what the kernel takes, and how a launch is cut."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem

# Elements of a head by format: rows of 64, 128 or 256 bytes; MXFP4's scales are those of 128 numbers, a whole word.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
MOST_HEADS = 128
MOST_TOKENS = 256  # of a block: their numbers are in shared memory
ROWS = 128  # keys of a product: the lanes of tensor memory
TILES = 2  # of keys in a block, a warpgroup each
KEYS = TILES * ROWS
_STEP = 16  # columns of a product are multiples
_WIDE = 128  # columns of a product at most
_SWIZZLE = 128  # bytes of a row that are swizzled together
_TENSOR_COLUMNS = 512
_TILE_COLUMNS = 4  # of tensor memory: the scales of 128 rows of MXFP4
# Bytes of shared memory for keys and queries: of a block, and of each of two on a multiprocessor. With a thread's
# numbers of 32 columns at once, two blocks would not have registers.
_SHARED, _HALF = 208 << 10, 104 << 10
_AT_ONCE = {1: 32, 2: 16}
_MOST_STAGES = 8
_START = 2  # what a block's start takes, in tokens: as on an H200


@dataclass(frozen=True)
class Config:
    """``stored`` is the dtype of q and k, or "mxfp4"."""

    stored: str
    weights: str
    heads: int
    dim: int  # numbers
    together: int  # tokens of a product
    stages: int
    buffers: int  # of sums of each tile
    ids: bool
    paged: bool
    q_scale: bool  # float32
    k_scale: bool
    load: int  # bytes of a load of keys

    @property
    def blocks(self) -> int:
        """Of a multiprocessor: while one starts, the other has work. Keys that are loaded by less than 16 bytes, and
        scales of q, take more registers than half of all: 64 heads spilled 8 bytes."""
        fits = KEYS * self.row_bytes + self.stages * self.stage_bytes <= _HALF
        fits = fits and self.load >= 16 and not self.q_scale
        return 2 if fits and 2 * self.tensor_columns <= _TENSOR_COLUMNS else 1

    @property
    def at_once(self) -> int:
        """Columns of sums that a thread has in registers."""
        return _AT_ONCE[self.blocks]

    @property
    def four(self) -> bool:
        return self.stored == "mxfp4"

    @property
    def row_bytes(self) -> int:
        """Of a key, and of a head's query."""
        return row_bytes(self.stored, self.dim)

    @property
    def box_bytes(self) -> int:
        """Of a row that are swizzled together."""
        return min(self.row_bytes, _SWIZZLE)

    @property
    def boxes(self) -> int:
        return self.row_bytes // self.box_bytes

    @property
    def columns(self) -> int:
        """Of a token in a product."""
        return columns(self.heads)

    @property
    def wide(self) -> int:
        """Columns of a product."""
        return self.together * self.columns

    @property
    def stage_bytes(self) -> int:
        """Of a product's queries."""
        return self.wide * self.row_bytes

    @property
    def scale_columns(self) -> int:
        """Of tensor memory for scales of MXFP4: of the keys, and of the queries of each stage."""
        return (TILES + self.stages) * _TILE_COLUMNS if self.four else 0

    @property
    def first_scales(self) -> int:
        """The column of tensor memory behind the sums."""
        return TILES * self.buffers * self.wide

    @property
    def tensor_columns(self) -> int:
        """That a block takes, a power of two: two blocks of a multiprocessor may have half of all."""
        return max(32, 1 << (self.first_scales + self.scale_columns - 1).bit_length())

    @property
    def consumer_warps(self) -> int:
        return TILES * 4

    @property
    def threads(self) -> int:
        """Consumers, and a warp that loads queries, one that multiplies, two that clear."""
        return 32 * (self.consumer_warps + 4)


def columns(heads: int) -> int:
    """Heads, and as many more as make the columns of a product."""
    return -(-heads // _STEP) * _STEP


def row_bytes(stored: str, dim: int) -> int:
    return dim * {"mxfp4": 1, "f8e4m3": 2}.get(stored, 4) // 2


def shape(problem: Problem, stored: str) -> tuple[int, int, int]:
    """Tokens of a product, its stages, and buffers of sums.

    Of two tokens a product reads the keys half as often. One token of a request, and MXFP4, whose scales want room too,
    have products of one. Of one token a block has one product: then there are two blocks on a multiprocessor, each with
    half of tensor memory at most.
    """
    p, many = problem, (problem.tokens if problem.ids else tokens_of_request(problem)) > 1
    wide, row = columns(p.heads), row_bytes(stored, p.dim)
    together = 2 if many and stored != "mxfp4" and 2 * wide <= _WIDE else 1
    buffers = 2 if many and wide <= _WIDE // 2 else 1
    room = (_SHARED if many or wide > _WIDE // 2 else _HALF) - KEYS * row
    return together, max(2, min(_MOST_STAGES, room // (together * wide * row))), buffers


def streams(problem: Problem) -> bool:
    """Whether keys stream past queries: by no kernel of this architecture."""
    return False


def tokens_of_request(problem: Problem) -> int:
    return problem.tokens // max(problem.requests, 1)


def tokens_of_block(problem: Problem, sms: int) -> int:
    """How many tokens of a request a block takes: more are fewer starts, fewer fill the machine more evenly. Blocks
    that run at a time count as one more half."""
    tokens = problem.tokens if problem.ids else tokens_of_request(problem)
    tiles = -(-problem.entries // KEYS) * problem.requests

    def time(each: int) -> float:
        return (-(-tiles * -(-tokens // each) // sms) + 0.5) * (min(each, tokens) + _START)

    return min((MOST_TOKENS >> i for i in range(6)), key=time)
