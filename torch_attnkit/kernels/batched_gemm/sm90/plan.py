"""Tile shapes of the batched GEMM on Hopper, and which kernel takes a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...grouped_gemm.problem import BLOCK, CONTIGUOUS, LINEAR, SPAN
from ...grouped_gemm.sm90.config import BOX as FP4_BOX
from ...grouped_gemm.sm90.config import CODE_ALIGNMENT, WARP_ROWS
from ..plan import CHUNK
from ..problem import Fp4Problem, Problem

WARPGROUP_ROWS = 64  # features of a warpgroup that multiplies
_SHARED, _BARRIERS = 226 << 10, 1 << 10  # of a block, and beside that
_MOST_STAGES = 16
# Features and tokens of the work tiles that there are, and K of them in a stage.
TILES = (
    (64, 8, 128), (64, 16, 128), (64, 32, 128), (64, 64, 128), (64, 128, 128), (128, 128, 64), (128, 256, 64),
)  # fmt: skip
# What a multiprocessor does in a clock: products, and elements of 16 bits that it gets from L2. Counted, not measured.
_PRODUCTS, _L2_ELEMENTS = 2048, 20

_LEAST_CODE_ALIGNMENT = 8  # bytes: of a row of FP4 codes that starts anywhere a copy is made
FEW_BOX_ROWS = 64  # of FP4 weights that TMA loads at a time, for few tokens
FEW_COLUMNS = (1, 2, 4, 8, 16, 32)  # tokens of such a product
_FEW_E4M3 = 4  # tokens up to which codes are multiplied, and scaled later
# Warps of a block by columns: four a scheduler, for decoding is long chains of instructions, or fewer, where threads
# have too few registers: 128 for 32 columns, and of two blocks 64 for 4.
_FEW_WARPS = {1: 16, 2: 16, 4: 8, 8: 16, 16: 16, 32: 12}
# Rows of a block, and slices of K, a block each. Of codes a multiprocessor has two blocks of 64 rows at a time.
_FEW_E4M3_BLOCKS = ((64, 1), (64, 2), (64, 4))
_FEW_MMA_BLOCKS = (*_FEW_E4M3_BLOCKS, (128, 1), (128, 2), (128, 4), (256, 2), (256, 4))
FEW_BLOCKS = {c: _FEW_E4M3_BLOCKS if c <= _FEW_E4M3 else _FEW_MMA_BLOCKS for c in FEW_COLUMNS}
_MOST_SCALE_STEP = 1 << 22  # bytes from a row's scales to the next's: places in a block have 32 bits
# What slices cost, in boxes' rows that are decoded: a microsecond for clusters to start, meet and read each other.
_FEW_CLUSTER_SYNC = 300
# Of all multiprocessors those that clusters of 4 fill. 128 blocks of an H200 took as long as twice their work in
# clusters of 2, so they were no one wave.
_FILLED_BY_4 = 0.9
# us of an H200, by which few tokens go to one kernel or the other: what a call takes at least, and for a box's row that
# is decoded, and multiplied with a column; by ``wgmma`` at least, and for a clock of each number of K. Fitted to 1 and
# 32 tokens (``wgmma``: 32 and 128) of 8 and 16 groups of 1024 x 4096.
_FEW_LEAST, _FEW_DECODED, _FEW_MULTIPLIED = 4.0, 0.0046, 0.00013
_FP4_LEAST, _FP4_CLOCK = 10.9, 0.184 / 4096
# Of FP4 weights by ``wgmma``: warps that multiply, tokens of a work tile.
_FP4_WARPS = 8
FP4_WIDTHS = tuple(range(32, 256, 16))
# Tokens of a work tile up to which two steps over K are multiplied at a time; clocks that a step takes at least, for so
# long codes are decoded, and more for what is done between products. Counted on grouped_gemm's figures.
_FP4_NARROW, _FP4_STEP, _FP4_BETWEEN = 80, 45, 20
_PREPARE_BLOCKS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Tile:
    """A CTA has ``features`` x ``tokens`` results. Both CTAs of a ``pair`` have the same tokens, and load half each."""

    features: int
    tokens: int
    k: int  # in a stage
    pair: bool
    early: bool = True  # whether the launch begins while the one before it ends

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return 2 if self.pair else 1

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.features // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Consumers, and a warp that loads."""
        return 128 * self.consumers + 32

    @property
    def stage_bytes(self) -> int:
        return (self.features + self.tokens) * self.k * 2

    @property
    def stored(self) -> int:
        """Tokens whose results a warpgroup stores at a time."""
        return min(self.tokens, 64)

    @property
    def buffers(self) -> int:
        """Outputs that a warpgroup has in flight."""
        return min(2, self.tokens // self.stored)

    @property
    def result_bytes(self) -> int:
        """Of one of them."""
        return self.stored * WARPGROUP_ROWS * 2

    @property
    def stages(self) -> int:
        budget = _SHARED - self.consumers * self.buffers * self.result_bytes
        return min(_MOST_STAGES, budget // self.stage_bytes)


def tile(problem: Problem, sms: int) -> Tile | None:
    """The tile with the least estimated time; none where TMA cannot take the rows."""
    p = problem
    if any(n % CHUNK for n in (p.k, p.n, *p.x, *p.weight)):
        return None

    def cost(tile: Tile) -> float:
        """Clocks for a number of K."""
        tiles = p.groups * -(-p.n // (tile.features * tile.ctas)) * tile.ctas * -(-p.tokens // tile.tokens)
        loaded = tile.features + tile.tokens / tile.ctas
        return -(-tiles // sms) * max(tile.features * tile.tokens / _PRODUCTS, loaded / _L2_ELEMENTS)

    # A pair shares enough tokens to be worth waiting for each other, and has features for both.
    pairs = (f < p.n and t >= 32 for f, t, _ in TILES)
    return min((Tile(*sizes, pair) for sizes, pair in zip(TILES, pairs, strict=True)), key=cost)


@dataclass(frozen=True)
class FewTokens:
    """A CTA has ``rows`` of weights x ``columns`` tokens, and one of ``slices`` of K: so many ``boxes`` of 256
    elements."""

    format: str
    columns: int
    rows: int
    slices: int
    boxes: int
    scale_vector: int
    early: bool = True  # whether the launch begins while the one before it ends

    @property
    def e4m3(self) -> bool:
        """Whether the MMA is E4M3 ``wgmma``; else bf16 ``mma.sync``."""
        return self.columns <= _FEW_E4M3

    @property
    def resident(self) -> int:
        """CTAs of an SM."""
        return 2 if self.e4m3 else 1

    @property
    def warp_tiles(self) -> int:
        """Of 16 rows of a warp. Of many tokens, what is read of them serves two."""
        return 2 if self.rows == 256 or self.columns == 32 else 1

    @property
    def e4m3_columns(self) -> int:
        """Of an E4M3 MMA. Every quarter of a span has columns of its own: a pair for two tokens, or for
        both blocks of one."""
        return 8 * -(-self.columns // 2)

    @property
    def row_warps(self) -> int:
        """That have all rows together."""
        return self.rows // (WARP_ROWS * self.warp_tiles)

    @property
    def parts(self) -> int:
        """Warps of the same rows, which take boxes in turn."""
        return min(_FEW_WARPS[self.columns] // self.row_warps, self.boxes)

    @property
    def warps(self) -> int:
        return self.row_warps * self.parts

    @property
    def ahead(self) -> int:
        """Boxes of a warp whose scales are loaded together."""
        return 2 // self.warp_tiles // self.resident

    @property
    def teams(self) -> int:
        """Of warps that have the rows of a box together."""
        return self.rows // FEW_BOX_ROWS

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def sum_pitch(self) -> int:
        """Floats from a token's sums to the next token's: lanes that store at once do so in different banks."""
        return self.rows + 4

    @property
    def row_bytes(self) -> int:
        """Of a token of the slice: rows that are read at once begin in different banks."""
        return self.boxes * FP4_BOX * 2 + 16

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring: tokens, and later sums."""
        tokens = self.e4m3_bytes + self.scales * 4 if self.e4m3 else self.columns * self.row_bytes
        return max(tokens, self.columns * self.parts * self.sum_pitch * 4)

    @property
    def e4m3_bytes(self) -> int:
        """Of the tokens, re-encoded as E4M3."""
        return self.e4m3_columns * self.boxes * FP4_BOX

    @property
    def scales(self) -> int:
        """Of the tokens, as float32."""
        return self.columns * self.boxes * FP4_BOX // BLOCK[self.format]

    @property
    def stages(self) -> int:
        """All boxes, if they fit, so that all are in flight from the start; else as many for each part, so that a stage
        is always of the same one. Another part may be a round behind, and of its barrier every other phase has the same
        parity: one would take the other's box for its own."""
        budget = _SHARED - self.fixed_bytes if self.resident == 1 else _SHARED // 2 - _BARRIERS - self.fixed_bytes
        found = budget // (self.rows * FP4_BOX // 2)
        return self.boxes if found >= self.boxes else found // self.parts * self.parts


def few(problem: Fp4Problem, sms: int) -> FewTokens | None:
    """For so few tokens that a slice's fit into shared memory, unless ``wgmma`` is estimated to be faster; packed rows
    must start and end where TMA takes them."""
    p = problem
    columns = next((c for c in FEW_COLUMNS if c >= p.tokens), None)
    if columns is None or _code_alignment(p.k, p.weight) != CODE_ALIGNMENT or p.weight_scale[-1] > _MOST_SCALE_STEP:
        return None
    boxes = -(-p.k // FP4_BOX)
    made = (
        FewTokens(p.format, columns, rows, slices, -(-boxes // slices), _scale_vector(p))
        for rows, slices in FEW_BLOCKS[columns] if slices <= boxes
    )  # fmt: skip

    def cost(few: FewTokens) -> tuple[int, int]:
        """Numbers that a multiprocessor decodes, its tokens' among them, and what meeting costs; of equals, large
        blocks."""
        filled = int(sms * _FILLED_BY_4) if few.slices == 4 else sms
        waves = -(-(-(-p.n // few.rows) * p.groups * few.slices) // filled)
        return waves * few.boxes * (few.rows + columns) + _FEW_CLUSTER_SYNC * (few.slices > 1), -few.rows

    best = min((few for few in made if few.stages >= min(2, few.boxes)), key=cost, default=None)
    if best is None:
        return None
    taken = _FEW_LEAST + cost(best)[0] * (_FEW_DECODED + _FEW_MULTIPLIED * columns)
    by_wgmma = _FP4_LEAST + _FP4_CLOCK * p.k * min(_fp4_clocks(p, sms, width) for width in FP4_WIDTHS)
    return best if taken <= by_wgmma else None


@dataclass(frozen=True)
class Fp4WgmmaPlan:
    """A GEMM by the experts' ``wgmma`` kernel."""

    columns: int  # most tokens of a work tile
    widths: tuple[int, ...]  # that are multiplied, see ``WgmmaConfig``
    group: int
    warps: int
    code_alignment: int
    scale_vector: int
    o_alignment: int  # of o's codes
    x_columns: int  # of o in bf16
    prepare_blocks: int
    blocks: int


def fp4(problem: Fp4Problem, sms: int) -> Fp4WgmmaPlan:
    p, rows = problem, _fp4_rows(problem)
    width = min(FP4_WIDTHS, key=lambda width: _fp4_clocks(p, sms, width))
    tiles = -(-p.tokens // width)
    columns = -(-p.tokens // (8 * tiles)) * 8  # of all work tiles about as many
    spans = -(-p.k // SPAN)
    return Fp4WgmmaPlan(
        columns=columns,
        widths=(max(columns, FP4_WIDTHS[0]),),
        group=2 if columns <= _FP4_NARROW else 1,
        warps=_FP4_WARPS,
        code_alignment=_code_alignment(p.k, p.weight),
        scale_vector=_scale_vector(p),
        o_alignment=_code_alignment(p.k, p.x),
        x_columns=spans * SPAN,
        prepare_blocks=min(_PREPARE_BLOCKS * sms, -(-p.tokens * p.groups * spans // 64)),
        blocks=min(sms, rows * tiles),
    )


def _fp4_rows(p: Fp4Problem) -> int:
    """Tiles of rows of all groups."""
    return -(-p.n // (WARP_ROWS * _FP4_WARPS)) * p.groups


def _fp4_clocks(p: Fp4Problem, sms: int, width: int) -> int:
    """Of a step over K, of all work tiles of a multiprocessor, which have up to ``width`` tokens."""
    return -(-_fp4_rows(p) * -(-p.tokens // width) // sms) * (max(width, _FP4_STEP) + _FP4_BETWEEN)


def scale_kind(problem: Fp4Problem) -> int:
    """Layout of the weights' scales."""
    return LINEAR if problem.scale_layout == "linear" else CONTIGUOUS


def _scale_vector(p: Fp4Problem) -> int:
    """Bytes of scales that a load may take."""
    block = BLOCK[p.format]
    return math.gcd(FP4_BOX // block, p.k // block, *p.weight_scale) if p.scale_layout == "linear" else 4


def _code_alignment(k: int, steps: tuple[int, ...]) -> int:
    """Bytes at whose multiples packed rows start and end; of a copy if they are too few."""
    found = math.gcd(CODE_ALIGNMENT, k // 2, *steps)
    return found if found >= _LEAST_CODE_ALIGNMENT else math.gcd(CODE_ALIGNMENT, k // 2)
