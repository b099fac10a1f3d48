"""Tile shapes of the batched GEMM by ``mma.sync``."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
