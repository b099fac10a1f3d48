"""Compile-time configuration of the block-scaled grouped GEMM by ``mma.sync``."""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.cuda.limits import LIMITS

from ..problem import BLOCK
from ..sm100.config import FEATURES, WEIGHT_ROWS

K_TILE = 128  # elements of a row in one stage
ROW_BYTES = K_TILE // 2
_MOST_STAGES = 6


@dataclass(frozen=True)
class Config:
    """One GEMM. ``paired``: rows of a work tile are gate and up, eight of each in turn."""

    format: str
    activations: str
    tokens: int  # of a work tile at most
    paired: bool
    scale_vector: int  # as ``WeightScales`` has it
    warps: tuple[int, int] = (4, 2)  # along tokens, along rows of weights: whole blocks of h in a warp

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def m_tiles(self) -> int:
        """Of 16 tokens, of a warp."""
        return self.tokens // self.warps[0] // 16

    @property
    def n_tiles(self) -> int:
        """Of 8 rows of weights, of a warp."""
        return self.n // self.warps[1] // 8

    @property
    def n(self) -> int:
        return WEIGHT_ROWS

    @property
    def rows(self) -> int:
        """Of weights, of a work tile."""
        return WEIGHT_ROWS

    @property
    def features(self) -> int:
        return FEATURES

    @property
    def block(self) -> int:
        return BLOCK[self.format]

    @property
    def scales(self) -> int:
        """Of a row in a stage, and their bytes."""
        return K_TILE // self.block

    @property
    def scale_bytes(self) -> int:
        return self.scales

    @property
    def stage_rows(self) -> int:
        """Of both operands: tokens, then weights."""
        return self.tokens + self.n

    @property
    def token_bytes(self) -> int:
        """Of a token's codes in a stage."""
        return K_TILE if self.activations == "mxfp8" else ROW_BYTES

    @property
    def weights_at(self) -> int:
        """Where weights begin in a stage."""
        return self.tokens * self.token_bytes

    @property
    def scales_at(self) -> int:
        """And the scales of both operands."""
        return self.weights_at + self.n * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + self.stage_rows * self.scale_bytes

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (LIMITS["sm120"].shared - 1024) // self.stage_bytes)
