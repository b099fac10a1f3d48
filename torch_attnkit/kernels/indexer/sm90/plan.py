"""Launch planning of the Hopper indexer: what its kernels accept, tile shapes, and which one runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem

# Elements of a head by format: the lanes of a quad load 64 bytes of a key together.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
MOST_HEADS = 128  # an accumulator of 64 keys has half as many registers
MOST_TOKENS = 256  # of a block: their indices are in shared memory
_ROWS = 64  # of a product
# What a block's start takes, in tokens, by what an H200 prefers: blocks of 256 tokens were up to 2 % faster than of 128
# where these fill it more evenly, for who still works gets the power of who has nothing left to do.
_START = 8
_WIDE = 64  # heads of which two accumulators fit into registers
# Consumer warpgroups of a block, products of 64 keys of each, tokens of a product: for E4M3, whose keys have half as
# many registers as others; with scales of q, which take as many as weights (with them (4, 1, 2) spills); for 16 bits;
# and for more heads than those.
OF_CODES = (4, 1, 2)
OF_SCALED = (3, 2, 1)
OTHERS = (2, 2, 1)
OF_MANY_HEADS = (2, 1, 1)
_SMEM_BUDGET = 160 << 10  # bytes of shared memory for queries, or for keys
_HALF = 96 << 10  # the same for one of two blocks
LEAST_STAGES = 4  # of each of two blocks

# Few tokens: keys come by TMA in boxes, one for each consumer warpgroup.
BOX = 64
CONSUMERS = 2
TILE = CONSUMERS * BOX
MOST_REQUESTS = 1024  # every block adds up the tiles of all of them
FEW = 4  # tokens of a request; more of them keep the tensor cores busy, and keys are then better in registers
FEW_DECODED = 3  # the same of keys that are decoded on the way: with sums of a fourth registers spill

# Selection in the kernel for few tokens: counters of a pass, in groups, and what a token has of them in device memory.
BITS = 11  # of a key, that one pass decides
PASSES = 3
BINS, GROUP = 1 << BITS, 64
GROUPS = BINS // GROUP  # one a lane
SUMS = BINS + GROUPS
# Entries from which one kernel is faster than two; to be set by (measurement of both on an H200).
SELECTS_FROM = 1
LINE = 32  # elements from one arrival counter to the next
_SHARED = 227 << 10  # bytes of shared memory of a block


@dataclass(frozen=True)
class Config:
    """Many tokens. ``stored``: dtype of keys in memory, or "mxfp4"; ``dtype``: that of the MMA."""

    stored: str
    dtype: str
    weights: str
    heads: int
    dim: int
    stages: int
    ids: bool
    paged: bool
    q_scale: bool
    k_scale: bool
    load: int  # bytes of a load of keys
    consumers: int  # warpgroups
    tiles: int  # products of a warpgroup, of which one is summed up while the other is computed
    tokens_per_mma: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a key in memory."""
        return row_bytes(self.stored, self.dim)

    @property
    def itemsize(self) -> int:
        """Bytes of an MMA operand element."""
        return 1 if self.dtype == "f8e4m3" else 2

    @property
    def columns(self) -> int:
        """MMA columns of a token."""
        return columns(self.heads)

    @property
    def pitch(self) -> int:
        return pitch(self.columns)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.consumers * self.tiles * _ROWS

    @property
    def threads(self) -> int:
        """Consumers, and a warpgroup with one producer warp and three that store -inf."""
        return (self.consumers + 1) * 128

    @property
    def registers(self) -> tuple[int, int]:
        """setmaxregister of consumers and of the others."""
        return {2: (232, 40), 3: (152, 56), 4: (112, 32)}[self.consumers]


@dataclass(frozen=True)
class StreamConfig:
    """Few ``tokens`` of a request; ``stored`` and ``dtype`` as in ``Config``."""

    stored: str
    dtype: str
    weights: str
    heads: int
    dim: int
    tokens: int
    stages: int
    blocks: int  # that a multiprocessor has
    paged: bool
    q_scale: bool
    k_scale: bool

    loader: int = CONSUMERS * 4  # the first warp that loads

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.stored, self.dim)

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype == "f8e4m3" else 2

    @property
    def scales(self) -> bool:
        """Whether a key has 4 bytes of scales: one float32, or four blocks'."""
        return self.k_scale or self.stored == "mxfp4"

    @property
    def columns(self) -> int:
        return columns(self.heads)

    @property
    def pitch(self) -> int:
        return pitch(self.columns)

    @property
    def threads(self) -> int:
        """Consumers, and a producer warp each for keys, queries and, if any, k scales."""
        return (self.loader + 2 + self.scales) * 32


@dataclass(frozen=True)
class SelectConfig:
    """Fused selection for few tokens of one request: ``stream`` scores, of which ``capacity`` a token stay in a CTA."""

    stream: StreamConfig
    capacity: int

    @property
    def tokens(self) -> int:
        return self.stream.tokens

    @property
    def shared(self) -> int:
        """Upper bound of shared-memory bytes."""
        c, tokens = self.stream, self.tokens
        keys = c.stages * TILE * (c.row_bytes + 4)
        queries = 2 * tokens * (c.columns * c.dim * c.itemsize + 32 * c.pitch)
        return keys + queries + 8 * MOST_REQUESTS + 4 * tokens * (self.capacity + BINS) + (4 << 10)

    @property
    def sums(self) -> int:
        """Global counters that CTAs add to."""
        return self.tokens * PASSES * SUMS


def row_bytes(stored: str, dim: int) -> int:
    """Bytes of a key of ``dim`` channels in memory."""
    return dim * {"mxfp4": 1, "f8e4m3": 2}.get(stored, 4) // 2


def columns(heads: int) -> int:
    """Heads rounded up to MMA columns."""
    return -(-heads // 8) * 8


def pitch(columns: int) -> int:
    """Pitch of the weights of a quad's lanes in shared memory, padded so that the four are in different banks."""
    return (columns // 4 + 4) // 4 * 4


def product_dtype(format: str, dtype: torch.dtype) -> torch.dtype:
    """dtype of the MMA, which holds every value of the format."""
    return torch.bfloat16 if format == "mxfp4" else dtype


def shape(heads: int, itemsize: int, q_scale: bool) -> tuple[int, int, int]:
    """(consumer warpgroups, MMAs of 64 keys of each, tokens of an MMA)."""
    if columns(heads) > _WIDE:
        return OF_MANY_HEADS
    if itemsize > 1:
        return OTHERS
    return OF_SCALED if q_scale else OF_CODES


def stages(heads: int, row_bytes: int, tokens_per_mma: int = 1) -> int:
    """Stages of the query ring."""
    return max(2, min(8, _SMEM_BUDGET // (tokens_per_mma * columns(heads) * row_bytes)))


def streams(problem: Problem) -> bool:
    """Whether keys stream past queries: few tokens, and keys that TMA can read."""
    p = problem
    most = (FEW_DECODED if p.format == "mxfp4" else FEW) * _WIDE  # columns of sums
    few = not p.ids and p.requests <= MOST_REQUESTS and 0 < tokens_of_request(p) * columns(p.heads) <= most
    tiles = p.requests * -(-p.entries // TILE)
    boxes = not p.paged or p.page % BOX == 0
    aligned = all(step > 0 and step * p.dtype.itemsize % 16 == 0 for step in p.k_steps)
    return few and tokens_of_request(p) <= FEW and boxes and aligned and tiles < 1 << 30


def selects(problem: Problem, stream: StreamConfig, blocks: int) -> SelectConfig | None:
    """Configuration of the fused selection, or None if ``blocks`` CTAs cannot hold all scores of one request."""
    if problem.requests != 1 or problem.entries < SELECTS_FROM:
        return None
    share = -(-problem.entries // (TILE * blocks)) * TILE
    capacity = 1 << (share - 1).bit_length()  # not a kernel for each length
    fitting = SelectConfig(stream, capacity)
    return fitting if fitting.shared <= _SHARED else None


def tokens_of_request(problem: Problem) -> int:
    return problem.tokens // max(problem.requests, 1)


def stream_stages(tokens: int, heads: int, row_bytes: int, key_bytes: int = 0) -> int:
    """Stages of the key ring, a power of two, with one CTA per SM. ``row_bytes`` of a head of q, and of a key without
    ``key_bytes``."""
    queries, tile = 2 * tokens * columns(heads) * row_bytes, TILE * (key_bytes or row_bytes)
    return next(n for n in (8, 4, 2) if n == 2 or n * tile + queries <= _SMEM_BUDGET)


def stream_cut(tokens: int, heads: int, row_bytes: int) -> tuple[int, int]:
    """(stages, CTAs per SM): two if accumulators and enough stages of both fit, so that one loads while the other
    starts or ends."""
    queries, tile = 2 * tokens * columns(heads) * row_bytes, TILE * row_bytes
    if tokens * columns(heads) <= _WIDE and LEAST_STAGES * tile + queries <= _HALF:
        return next((n for n in (8, 4) if n * tile + queries <= _HALF), LEAST_STAGES), 2
    return stream_stages(tokens, heads, row_bytes), 1


def tokens_of_block(problem: Problem, keys: int, sms: int) -> int:
    """Tokens of a request per block: more save prologues, fewer balance SMs; the wave in flight counts as half a wave
    more."""
    tokens = problem.tokens if problem.ids else tokens_of_request(problem)
    tiles = -(-problem.entries // keys) * problem.requests

    def time(each: int) -> float:
        return (-(-tiles * -(-tokens // each) // sms) + 0.5) * (min(each, tokens) + _START)

    return min((MOST_TOKENS >> i for i in range(6)), key=time)
