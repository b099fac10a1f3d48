"""Compile-time configuration of the Blackwell kernels: warp roles, stages, columns of tensor memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..problem import BLOCK, SPAN

TOKENS = 128  # of a work tile, the lanes of tensor memory
WEIGHT_ROWS = 128  # of a work tile, the columns of an MMA
FEATURES = WEIGHT_ROWS // 2  # of h, of a work tile of the first GEMM: so many gate and so many up rows
ROW_BYTES = 128  # of a row in a stage, which TMA swizzles
STAGE = 2 * ROW_BYTES  # elements of them, if all are codes
STEP_BYTES = 32  # of a row, that a product takes
BITS = {"nvfp4": 4, "mxfp4": 4, "mxfp8": 8}  # of a token's number that is multiplied under a scale
TOKEN_BLOCK = {**BLOCK, "mxfp8": 32}  # elements of a token under one scale
TOKEN_BOX = 32  # rows that TMA loads at a time: of those that a work tile does not have, at most 31
FEW_TOKENS = 64  # of a work tile at most whose tokens are columns
COLUMN_STEP = 8  # in multiples of which a product has columns: of tokens as many as TMA loads at a time
# Warps: results, which each reach 32 lanes of tensor memory; scales, a row of tokens and one of weights a lane; then
# one each that multiplies, that loads weights, and that loads tokens.
RESULT_WARPS = 4
SCALE_WARPS = 4
PRODUCT_WARP = RESULT_WARPS + SCALE_WARPS
WEIGHT_WARP, TOKEN_WARP = PRODUCT_WARP + 1, PRODUCT_WARP + 2
THREADS = 32 * (TOKEN_WARP + 1)
# By row tiles of a work tile: stages that fit shared memory, and buffers of a row tile's sums in tensor memory. Of one
# row tile, one is stored while the next is multiplied; of two, the next two begin when the first of the last is stored.
STAGES = {1: 6, 2: 4}
FEW_STAGES = 7  # where tokens are columns
MOST_ROW_TILES = max(STAGES)
PAIR = 2  # CTAs that multiply a work tile of many tokens together
NEIGHBOURS = 2  # work tiles that share loads
BUFFERS = {1: 2, 2: 3}
SUMS = 2  # buffers where weights are decoded
ROW_ALIGNMENT = 16  # bytes at whose multiples packed rows start and end, which TMA takes
UNPACKED_ALIGNMENT = 32  # if it makes bytes of packed weights, of 128 elements at a time
STAGES_AHEAD = 4  # stages whose scales a warp has on their way
TAG_WORDS = 4  # that a row of h has of its token, see ``reduce.py``


def tag_bytes(hidden: int, row_tiles: int) -> int:
    """Behind the elements of a row of h: its token's tag, and counters of results, one for each tile of features."""
    return -(-(TAG_WORDS + -(-hidden // (WEIGHT_ROWS * row_tiles))) // 4) * 16


def by_scale(format: str, activations: str) -> bool:
    """Whether block-scaled MMA takes these activations and weights: scales of one kind and block."""
    return format == activations or (format, activations) == ("mxfp4", "mxfp8")


def bf16_parts(dtype: str, activations: str) -> int:
    """bf16 addends of an activation, where weights are dequantised: float16 has eleven bits, unless it is
    fake-quantised."""
    return 2 if dtype == "f16" and activations == "none" else 1


@dataclass(frozen=True)
class Config:
    """One GEMM. ``paired``: rows of a row tile are ``FEATURES`` of gate and as many of up."""

    format: str
    paired: bool
    scale_vector: int  # bytes of scales that one load may take
    activations: str
    row_tiles: int = 1  # of a work tile: more of them share its tokens
    ctas: int = 1  # of a work tile, with ``TOKENS`` each; each loads its part of a row tile's rows for all
    neighbours: int = 1  # work tiles that run at once
    shared: str = "tokens"  # what comes to all of them at once: or "weights", if they are of one expert
    tokens: int = TOKENS  # of a CTA's work tile at most

    @property
    def few(self) -> bool:
        """Swap-AB: whether tokens are the MMA's columns and weights its rows."""
        return self.tokens < TOKENS

    @property
    def token_box(self) -> int:
        """Rows of tokens that TMA loads at a time."""
        return COLUMN_STEP if self.few else TOKEN_BOX

    @property
    def stages(self) -> int:
        return FEW_STAGES if self.few else STAGES[self.row_tiles]

    @property
    def block(self) -> int:
        return BLOCK[self.format]

    @property
    def scales(self) -> int:
        """Of a row in a stage."""
        return self.stage // self.block

    @property
    def stage(self) -> int:
        """Elements of a row in a stage."""
        return ROW_BYTES * 8 // BITS[self.activations]

    @property
    def step(self) -> int:
        """Elements of a row that an MMA takes."""
        return STEP_BYTES * 8 // BITS[self.activations]

    @property
    def unpacked(self) -> bool:
        """Whether TMA unpacks weights to bytes, beside activations of 8 bits."""
        return self.activations == "mxfp8"

    @property
    def scale_bytes(self) -> int:
        """Of 128 rows in a stage."""
        return 128 * self.scales

    @property
    def rows(self) -> int:
        """Of weights, of a work tile."""
        return WEIGHT_ROWS * self.row_tiles

    @property
    def stage_scales(self) -> int:
        """Bytes of a stage's scales: of tokens, then of each row tile."""
        return (1 + self.row_tiles) * self.scale_bytes

    @property
    def box(self) -> Any:
        """Rows of a row tile that a CTA loads; those of gate and up as (FEATURES, 2), of which each of two has one."""
        return (FEATURES, 2 // self.ctas) if self.paired else WEIGHT_ROWS // self.ctas

    @property
    def box_layout(self) -> tuple[Any, Any]:
        """Shape and steps of a stage's packed weights."""
        steps = (ROW_BYTES, FEATURES * ROW_BYTES) if self.paired else ROW_BYTES
        return (self.box, ROW_BYTES), (steps, 1)


@dataclass(frozen=True)
class QuantizedRow:
    """A row of quantised activations in the workspace: packed elements, a whole number of MMAs, then their scales, a
    whole number of stages. Behind the last element are zeros as far as an MMA reads."""

    columns: Any  # elements
    activations: str

    @property
    def code_bytes(self) -> Any:
        return ((self.columns * BITS[self.activations] >> 3) + STEP_BYTES - 1) & -STEP_BYTES

    @property
    def nbytes(self) -> int:
        stage = ROW_BYTES * 8 // BITS[self.activations]
        scales = -(-self.columns // stage) * (stage // TOKEN_BLOCK[self.activations])
        return int(self.code_bytes + -(-scales // 16) * 16)


SPANS = STAGE // SPAN
DECODE_WARPS = 4 * SPANS  # of a group four, which each reach 32 lanes; every group has a span of a stage
DECODED_PRODUCT_WARP = RESULT_WARPS + DECODE_WARPS
DECODED_WEIGHT_WARP, DECODED_TOKEN_WARP = DECODED_PRODUCT_WARP + 1, DECODED_PRODUCT_WARP + 2
DECODED_THREADS = 32 * (DECODED_TOKEN_WARP + 1)
TOKEN_STAGES = 4
WEIGHT_STAGES = 4
DECODED_STAGES = 4
SPAN_COLUMNS = SPAN // 2  # of tensor memory, of a decoded span
CHUNK = 32  # tokens whose sums are exchanged through shared memory at a time
PITCH = WEIGHT_ROWS + 4  # words from a token's sums to the next: rows that are read at once begin in other banks


@dataclass(frozen=True)
class DequantConfig(Config):
    """One GEMM of dequantised weights. ``parts``: bf16 addends of an activation."""

    parts: int = 1

    @property
    def stage(self) -> int:
        return STAGE

    @property
    def unpacked(self) -> bool:
        return False

    @property
    def span_scales(self) -> int:
        return SPAN // self.block
