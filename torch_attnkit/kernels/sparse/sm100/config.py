"""Compile-time configuration of the Blackwell kernel and its shared-memory layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.smem import CHUNK, SHARED, Region, itemsize
from torch_attnkit.cuda.workspace import SplitLayout
from torch_attnkit.kernels.cache.problem import Row
from torch_attnkit.kernels.decode.sm100.config import CLUSTER, KEYS, Tcgen05Config

MOST_HEADS = 64  # of a CTA
MOST_SIDES = 2
MOST_CTAS = CLUSTER
LANES = 32
SOFTMAX_WARPS = 8  # two warpgroups
SOFTMAX_THREADS = SOFTMAX_WARPS * LANES
MMA_WARP = SOFTMAX_WARPS  # of a warpgroup whose other warps idle
LOAD_WARP = MMA_WARP + 4  # the first of the producer's
LOADERS = 4  # warps
THREADS = (LOAD_WARP + LOADERS) * LANES
_SMALL = 4 * 1024  # bytes, upper bound of statistics, masks and barriers
_TILES_AHEAD = 4  # tiles in flight; more gain nothing


class NamedBarrier(IntEnum):
    """IDs; 0 is __syncthreads."""

    SOFTMAX = 1


@dataclass(frozen=True)
class Config:
    """``heads``: of a CTA, 16, 32 or 64 (padded). ``sides``: CTAs with the same keys and other heads, 1 or 2.
    ``split_kv``: several CTAs share a token's keys. ``paged``: (window, entries) caches in pages. ``align``: alignment
    of cache rows in bytes. ``divided``: encoded rows have a global scale. ``fp4``: fields of the problem's ``Fp4``, the
    dtype by name. ``tma_rows``: caches have uniform row strides, so TMA finds rows by index."""

    dtype: Any
    dim: int
    heads: int
    sides: int
    split_kv: bool
    paged: tuple[bool, bool] = (False, False)
    format: str = "none"
    rope_dim: int = 0
    align: int = CHUNK
    divided: bool = False
    fp4: tuple[Any, ...] | None = None
    tma_rows: bool = False

    @cached_property
    def mma(self) -> Tcgen05Config:
        """MMA, tensor memory and the large shared-memory regions are those of decode with V = K."""
        bare = Tcgen05Config(self.dtype, self.dim, self.dim, self.heads, self.sides, stages=0, same=True)
        capacity = SHARED - _SMALL - bare.shared.ring.offset - 2 * KEYS * self.scale_bytes // self.sides
        stages = min(capacity // bare.stage_bytes, _TILES_AHEAD * bare.parts)
        return Tcgen05Config(self.dtype, self.dim, self.dim, self.heads, self.sides, stages, same=True)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def row(self) -> Row:
        """Row format of the caches."""
        return Row(self.format, self.dim, self.rope_dim)

    @property
    def scale_bytes(self) -> int:
        """Bytes behind the values of an encoded row: scales and padding."""
        return 0 if self.row.plain else self.row.layout.size - self.row.layout.scales

    @property
    def own_keys(self) -> int:
        """Keys of a tile that a producer warp copies."""
        return LANES // self.sides

    @property
    def gather4(self) -> bool:
        """Whether rows come by gather4: windows are padded to groups of 16 keys then, each group of one cache."""
        return self.tma_rows and self.sides > 1

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(first column, offset in a stage) of a part's blocks of columns."""
        return [(x * self.mma.columns, x * KEYS * self.mma.row_bytes) for x in range(self.mma.part // self.mma.columns)]

    @property
    def masks(self) -> int:
        """Tiles whose masks are kept: as many as the ring may hold parts of."""
        return -(-self.mma.stages // self.mma.parts)

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim)

    @property
    def scales(self) -> Region:
        """Scales of encoded rows: (2 tiles, own keys of four warps)."""
        return Region(self.mma.shared.nbytes, 2 * LOADERS * self.own_keys * self.scale_bytes)
