"""What the kernel of Blackwell is compiled for, and its shared memory."""

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
PRODUCT_WARP = SOFTMAX_WARPS  # of a warpgroup whose other warps have nothing to do
LOAD_WARP = PRODUCT_WARP + 4  # the first of the producer's
LOADERS = 4  # warps
THREADS = (LOAD_WARP + LOADERS) * LANES
_SMALL = 4 * 1024  # of shared memory, of which statistics, masks and barriers take less than this
_TILES_AHEAD = 4  # tiles in memory, more than which bring no key earlier


class NamedBarrier(IntEnum):
    """Of a CTA; 0 is that of all threads."""

    SOFTMAX = 1


@dataclass(frozen=True)
class Config:
    """``heads``: of a CTA, 16, 32 or 64; fewer are padded. ``sides``: CTAs that share keys, each with other heads, 1 or
    2. ``merge``: several CTAs have a share of a token's keys each. ``paged``: whether the keys of windows and the
    entries lie in pages. ``align``: bytes, at whose multiples rows start; ``divided``: the numbers of encoded ones, by
    a global scale. ``fp4``: the fields of a problem's ``Fp4``, the dtype by its name. ``numbered``: TMA finds rows by
    their numbers."""

    dtype: Any
    dim: int
    heads: int
    sides: int
    merge: bool
    paged: tuple[bool, bool] = (False, False)
    format: str = "none"
    rope_dim: int = 0
    align: int = CHUNK
    divided: bool = False
    fp4: tuple[Any, ...] | None = None
    numbered: bool = False

    @cached_property
    def mma(self) -> Tcgen05Config:
        """Products, tensor memory and the large parts of shared memory are those of decode where V is K."""
        bare = Tcgen05Config(self.dtype, self.dim, self.dim, self.heads, self.sides, stages=0, same=True)
        room = SHARED - _SMALL - bare.shared.ring.offset - 2 * KEYS * self.scale_bytes // self.sides
        stages = min(room // bare.stage_bytes, _TILES_AHEAD * bare.parts)
        return Tcgen05Config(self.dtype, self.dim, self.dim, self.heads, self.sides, stages, same=True)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def row(self) -> Row:
        """Of the caches."""
        return Row(self.format, self.dim, self.rope_dim)

    @property
    def scale_bytes(self) -> int:
        """What follows the numbers of an encoded row: its scales, and zeros."""
        return 0 if self.row.plain else self.row.layout.size - self.row.layout.scales

    @property
    def own_keys(self) -> int:
        """Of a tile, those that one warp of the producer copies."""
        return LANES // self.sides

    @property
    def grouped(self) -> bool:
        """Whether windows are padded, so that keys of a group are all of the window or all entries."""
        return self.numbered and self.sides > 1

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Of a part: the first columns of its blocks, and where these are in a stage."""
        return [(x * self.mma.columns, x * KEYS * self.mma.row_bytes) for x in range(self.mma.part // self.mma.columns)]

    @property
    def masks(self) -> int:
        """Tiles whose masks are kept: as many as the ring may have parts of."""
        return -(-self.mma.stages // self.mma.parts)

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim)

    @property
    def scales(self) -> Region:
        """Behind the large parts: the scales of encoded rows, (2 tiles, own keys of four warps)."""
        return Region(self.mma.shared.nbytes, 2 * LOADERS * self.own_keys * self.scale_bytes)
