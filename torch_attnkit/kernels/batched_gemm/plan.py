"""How a product is cut into work tiles. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

K_TILE = 64  # numbers of a row in one stage: 128 bytes
CHUNK = 8  # numbers of 16 bytes, what a thread copies at once
BLOCK = {"nvfp4": 16, "mxfp4": 32}  # FP4 numbers under one scale
FP4_STAGE = 256  # FP4 numbers of a row in one stage
FP4_ROWS = 64  # rows of FP4 weights of a work tile
_FP4_STAGES = {8: 8, 32: 6, 64: 4}  # by the tokens that a work tile may have; 128 spill registers


@dataclass(frozen=True)
class Config:
    """A CTA has ``tokens`` x ``n`` results, in ``warps`` (along tokens, along n), and a ring of ``stages``."""

    tokens: int
    n: int
    warps: tuple[int, int]
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def stage_bytes(self) -> int:
        return (self.tokens + self.n) * K_TILE * 2


def configure(tokens: int) -> Config:
    """Few tokens: narrow tiles and a deep ring, for reading the weights is all there is to do. None is tuned."""
    if tokens <= 16:
        return Config(16, 64, (1, 4), 8)
    if tokens <= 64:
        return Config(32, 64, (1, 4), 8)
    return Config(128, 128, (2, 4), 4)


@dataclass(frozen=True)
class Fp4Config:
    """A CTA has ``columns`` tokens x ``FP4_ROWS`` results. A stage: codes of weights, their factors, tokens."""

    format: str
    columns: int

    @property
    def block(self) -> int:
        return BLOCK[self.format]

    @property
    def stages(self) -> int:
        return _FP4_STAGES[self.columns]

    @property
    def factor_bytes(self) -> int:
        """Of a row in a stage, in bf16."""
        return FP4_STAGE // self.block * 2

    codes_at = 0  # bytes from the stage's first

    @property
    def factors_at(self) -> int:
        return FP4_ROWS * FP4_STAGE // 2

    @property
    def tokens_at(self) -> int:
        return self.factors_at + FP4_ROWS * self.factor_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tokens_at + self.columns * FP4_STAGE * 2


def fp4_columns(tokens: int) -> int:
    """Tokens of a work tile: all of them if they are few, so that weights are read and decoded once. Not tuned."""
    return next((columns for columns in _FP4_STAGES if columns >= tokens), max(_FP4_STAGES))
