"""Tile shapes of the batched GEMM by ``mma.sync``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..grouped_gemm.problem import BLOCK
from ..grouped_gemm.sm120.config import K_TILE as FP4_K_TILE
from ..grouped_gemm.sm120.config import ROW_BYTES
from .problem import Fp4Problem

K_TILE = 64  # elements of a row in one stage: 128 bytes
CHUNK = 8  # elements of 16 bytes, what a thread copies at once


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
    def m_tiles(self) -> int:
        """Of 16 tokens, of a warp."""
        return self.tokens // self.warps[0] // 16

    @property
    def n_tiles(self) -> int:
        """Of 8 features, of a warp."""
        return self.n // self.warps[1] // 8

    @property
    def stage_bytes(self) -> int:
        return (self.tokens + self.n) * K_TILE * 2


def configure(tokens: int, shared: int) -> Config:
    """Few tokens: narrow tiles and a deep ring, for reading the weights is all there is to do. None is tuned.

    ``shared``: bytes of shared memory that a CTA may have.
    """
    if tokens <= 16:
        return Config(16, 64, (1, 4), 8)
    if tokens <= 64:
        return Config(32, 64, (1, 4), 8)
    many = Config(128, 128, (2, 4), 4)
    return many if many.stages * many.stage_bytes <= shared else replace(many, stages=3)


@dataclass(frozen=True)
class Fp4Config(Config):
    """The same of FP4. ``block_scaled``: ``mma.sync`` multiplies codes and scales; else both are dequantised.
    ``whole``: K is a multiple of ``FP4_K_TILE``."""

    format: str
    block_scaled: bool
    whole: bool

    @property
    def stage_rows(self) -> int:
        """Of both operands: tokens, then weights."""
        return self.tokens + self.n

    @property
    def scale_bytes(self) -> int:
        """Of a row in a stage."""
        return FP4_K_TILE // BLOCK[self.format]

    @property
    def scales_at(self) -> int:
        """Where scales begin in a stage, behind all codes."""
        return self.stage_rows * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + self.stage_rows * self.scale_bytes


def configure_fp4(problem: Fp4Problem, arch: str) -> Fp4Config:
    """As ``configure``: 46 to 92 KB of shared memory."""
    sizes = (16, 64, (1, 4), 8) if problem.tokens <= 16 else (32, 64, (1, 4), 8)
    if problem.tokens > 64:
        sizes = (128, 128, (2, 4), 5)
    return Fp4Config(*sizes, problem.format, arch == "sm120", problem.k % FP4_K_TILE == 0)
