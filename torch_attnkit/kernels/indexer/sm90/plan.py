"""Host side of the indexer's scores on Hopper: what the kernel takes, and how a launch is cut. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem

DIMS = (64, 128)  # numbers of a head: multiples of 64, which the lanes of a quad load together
MOST_HEADS = 128  # an accumulator of 64 keys has half as many registers
MOST_TOKENS = 256  # of a block: their numbers are in shared memory
_CONSUMERS = 2  # warpgroups
_ROWS = 64  # of a product
_TILES = 2  # products of a warpgroup, of which one is summed up while the other is computed
_ROOM = 160 << 10  # bytes of shared memory for queries


@dataclass(frozen=True)
class Config:
    """``stored`` is the dtype of keys in memory, ``dtype`` that of products."""

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
    tiles: int = _TILES

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


def product_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of products of such keys. E4M3 is exact in float16; sums of the tensor cores' E4M3 products have about
    14 bits on Hopper, where the op promises float32."""
    return torch.float16 if stored == torch.float8_e4m3fn else stored


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
