"""Host side of the indexer's scores on Hopper: what the kernel takes, and how a launch is cut. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem

# Elements of a head by format: the lanes of a quad load 64 bytes of a key together.
DIMS = {"none": (64, 128), "fp8": (64, 128), "mxfp4": (64,)}
MOST_HEADS = 128  # an accumulator of 64 keys has half as many registers
MOST_TOKENS = 256  # of a block: their numbers are in shared memory
_CONSUMERS = 2  # warpgroups
_ROWS = 64  # of a product
_WIDE = 64  # heads of which two accumulators fit into registers
_ROOM = 160 << 10  # bytes of shared memory for queries


@dataclass(frozen=True)
class Config:
    """``stored`` is the dtype of keys in memory, or "mxfp4", ``dtype`` that of products."""

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

    consumers: int = _CONSUMERS

    @property
    def tiles(self) -> int:
        """Products of a warpgroup, of which one is summed up while the other is computed, where registers allow."""
        return 2 if self.columns <= _WIDE else 1

    @property
    def row_bytes(self) -> int:
        """Of a key in memory."""
        return self.dim * {"mxfp4": 1, "f8e4m3": 2}.get(self.stored, 4) // 2

    @property
    def columns(self) -> int:
        """Heads, and as many more as make the columns of a product."""
        return -(-self.heads // 8) * 8

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.consumers * self.tiles * _ROWS

    @property
    def threads(self) -> int:
        """Consumers, and a warp that loads."""
        return self.consumers * 128 + 32


def product_dtype(format: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of products, one that holds every number of the format.

    Not E4M3: sums of its products have about 14 bits on Hopper, and the op promises float32.
    """
    return {"fp8": torch.float16, "mxfp4": torch.bfloat16}.get(format, dtype)


def stages(heads: int, dim: int) -> int:
    """Tokens whose queries are on the way or at work."""
    return max(2, min(8, _ROOM // (-(-heads // 8) * 8 * dim * 2)))


def tokens_of_block(problem: Problem, keys: int, sms: int) -> int:
    """How many tokens of a request a block takes: as many as leave enough blocks to fill the machine several times."""
    tokens = problem.tokens if problem.ids else problem.tokens // max(problem.requests, 1)
    tiles = -(-problem.entries // keys) * problem.requests
    most = MOST_TOKENS
    while most > 8 and tiles * -(-tokens // most) < 8 * sms:
        most //= 2
    return most
