"""Compile-time configuration of the Hopper kernels, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..problem import BLOCK, BULK_ROWS

BOX = 256  # elements of a row that TMA loads at a time, 128 bytes
WARP_ROWS = 16  # of a work tile
CONSUMERS = 8  # warps that multiply
WEIGHTS, TOKENS, SCHEDULER = range(CONSUMERS, CONSUMERS + 3)  # warps, of which there is one each
COMBINERS = 2  # warps that add up tokens' results, of the second GEMM, a work tile each in turn
FACTORS = 3  # warps that load scales, a stage each in turn, as far as there are stages
WARPS = SCHEDULER + 1 + COMBINERS + FACTORS
BOXES = 2  # of a stage that a consumer has: 32 KB of packed weights in all; one where a block has less than 224 KB
MOST_BLOCKS = 96  # of such a row
CODE_ALIGNMENT = 16  # of packed rows, their starts and ends, that TMA takes
TILES = 4  # work tiles that are known ahead
WIDTHS = (1, 2, 4)  # groups of 8 tokens that a work tile may have
MOST_COLUMNS = 8 * WIDTHS[-1]
SHARED = 223 * 1024  # of a block, without barriers, work tiles and what sorts slots
SHARED_SMALL = 92 * 1024  # where a block has 99 KB
_PAD = 16  # bytes between tokens in shared memory: rows that are read at once begin in different banks
_MOST_STAGES = 4
_MOST_TOKEN_STAGES = 12
TOKEN_BOX = 64  # elements of a token that TMA loads at a time to a ring of its own: 128 bytes, which it swizzles
# Tokens of a work tile, up to which an iteration has two spans: 212 instructions a span for 261 with 80 tokens.
# H200, 256 MXFP4 experts of 4096 x 2048, 2048 tokens: 1846 us for 2020.
_NARROW = 96
LOADERS = 4  # warps of which one loads weights, one tokens, and the others scales
SCALERS = 2  # these others, each with a part of the rows
_WEIGHT_BUDGET = ((96, 120 * 1024), (160, 60 * 1024), (256, 40 * 1024))  # by the most tokens of a work tile
_MOST_WEIGHT_STAGES = 4


@dataclass(frozen=True)
class Config:
    """One GEMM."""

    format: str
    row_warps: int  # consumers that share no rows; the others have other slices of K
    source: str  # dtype of the tokens: bf16, f16
    activations: str  # to which x and h are rounded before they are multiplied
    columns: int  # most tokens of a work tile
    paired: bool  # whether rows of a work tile are 8 of gate and 8 of up in turn
    scale_vector: int  # bytes of scales that one load may take, or STRADDLING, or TOGETHER
    code_alignment: int  # bytes at whose multiples packed rows start and end: CODE_ALIGNMENT, or 8
    shared: int = field(default=SHARED, kw_only=True)  # bytes, as SHARED or SHARED_SMALL

    @property
    def own_boxes(self) -> int:
        """Of a stage that a consumer has."""
        return BOXES if self.shared >= SHARED else 1

    @property
    def block(self) -> int:
        return BLOCK[self.format]

    @property
    def by_tma(self) -> bool:
        """Whether weights are loaded by TMA; otherwise the lanes of a warp copy them."""
        return self.code_alignment == CODE_ALIGNMENT

    @property
    def code_arrivals(self) -> int:
        """At the full barrier of a stage, of the weight producer warp."""
        return 1 if self.by_tma else 32

    @property
    def token_vector(self) -> int:
        """Elements of a row of x that are all inside or all outside."""
        return 2 * self.code_alignment

    @property
    def parts(self) -> int:
        """bf16 addends of an activation: one of 11 bits takes two of 8."""
        return 2 if self.source == "f16" and self.activations == "none" else 1

    @property
    def rows(self) -> int:
        """Weight rows of a work tile."""
        return WARP_ROWS * self.row_warps

    @property
    def slices(self) -> int:
        """Consumers that have the same rows, each with a box of every stage."""
        return CONSUMERS // self.row_warps

    @property
    def boxes(self) -> int:
        """Of a stage."""
        return self.own_boxes * self.slices

    @property
    def stage(self) -> int:
        """Elements of a row in a stage of the ring."""
        return BOX * self.boxes

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(w for w in WIDTHS if 8 * w <= self.columns)

    @property
    def features(self) -> int:
        """Results of a work tile for each token."""
        return self.rows // 2 if self.paired else self.rows

    @property
    def scales(self) -> int:
        """Bytes of scales of a row in a stage."""
        return self.stage // self.block

    @property
    def weight_bytes(self) -> int:
        """Of a stage, and so on."""
        return self.rows * self.stage // 2

    @property
    def token_row_bytes(self) -> int:
        """From a token, or a part of it, to the next."""
        return self.stage * 2 + _PAD

    @property
    def token_bytes(self) -> int:
        return self.parts * self.columns * self.token_row_bytes

    @property
    def factor_bytes(self) -> int:
        return self.rows * self.scales * 2

    @property
    def line_bytes(self) -> int:
        """Scales of a tile as in device memory, where bulk copies load them."""
        return self.rows * MOST_BLOCKS if self.scale_vector == BULK_ROWS else 0

    @property
    def sum_bytes(self) -> int:
        """For the reduction over slices of K: (slices - 1, rows, columns) of float32."""
        return (self.slices - 1) * self.rows * self.columns * 4

    @property
    def result_pitch(self) -> int:
        """Floats from a token's features to the next token's, where h is quantised."""
        return self.features + 4

    @property
    def result_bytes(self) -> int:
        """Features of a tile on their way to be quantised, of so many tokens at a time."""
        tokens = min(self.columns, MOST_COLUMNS)
        return tokens * self.result_pitch * 4 if self.paired and self.activations != "none" else 0

    @property
    def stages(self) -> int:
        """A power of two if there is room for four: what a wait computes delays the products."""
        stage = self.weight_bytes + self.token_bytes + self.factor_bytes
        return min(_MOST_STAGES, (self.shared - self.sum_bytes - self.result_bytes - self.line_bytes) // stage)

    @property
    def factor_warps(self) -> int:
        """A warp's next stage may be at most one round of the ring ahead: further, and its wait would take the round
        before for the one it waits for."""
        return min(FACTORS, self.stages)


@dataclass(frozen=True)
class WgmmaConfig(Config):
    """A GEMM for many tokens an expert. Weights and tokens have a ring each, and a stage of tokens is as wide as the
    widest tile, so it has fewer elements of each. A tile takes the least of ``token_widths`` that suffices."""

    token_widths: tuple[int, ...]  # tokens that are multiplied at once
    group: int  # steps over K that are multiplied at a time, while as many are decoded: 1, 2 or 4

    @property
    def boxes(self) -> int:
        return 1

    @property
    def token_boxes(self) -> int:
        """Of a stage of tokens."""
        return 2 if self.columns <= _NARROW else 1

    @property
    def spans(self) -> int:
        """Multiplied in an iteration. Two take fewer instructions, and multiply zeros at the end of rows of an odd
        number."""
        return 2 if self.columns <= _NARROW else 1

    @property
    def token_bytes(self) -> int:
        return self.columns * self.token_boxes * TOKEN_BOX * 2

    @property
    def slices(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        return 32 * (self.row_warps + LOADERS)

    @property
    def scaler(self) -> WgmmaConfig:
        """The same of a part of the rows."""
        return replace(self, row_warps=self.row_warps // SCALERS)

    @property
    def weight_stages(self) -> int:
        budget = next(budget for most, budget in _WEIGHT_BUDGET if self.columns <= most)
        return max(2, min(_MOST_WEIGHT_STAGES, budget // (self.weight_bytes + self.factor_bytes)))

    @property
    def token_stages(self) -> int:
        rest = self.shared - self.weight_stages * (self.weight_bytes + self.factor_bytes) - self.result_bytes
        stages = min(_MOST_TOKEN_STAGES, rest // self.token_bytes)
        return stages if self.token_boxes == 1 else 1 << stages.bit_length() - 1
