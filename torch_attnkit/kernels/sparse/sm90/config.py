"""What the kernel of Hopper is compiled for, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS, WARPS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.sm90.warpgroup import KVRing as Ring
from torch_attnkit.cuda.smem import CHUNK, Region, itemsize
from torch_attnkit.cuda.workspace import SplitLayout
from torch_attnkit.kernels.cache.problem import Row

from .plan import MOST_CTAS, staged

HALVES = 2  # of the columns of the output, a consumer warpgroup each; their tiles alternate, too
LOADERS = WARPS  # warps
CONSUMERS = HALVES * WARPS  # warps
CONSUMER_THREADS = HALVES * THREADS
STAGED = 2  # tiles whose rows come, or are decoded


@dataclass(frozen=True)
class Shared:
    """The shared memory of a CTA."""

    query: Region
    ring: Region
    probabilities: Region  # (2 tiles, 64 heads), rows of 128 bytes
    factors: Region  # of the output, (64, 2 tiles)
    maxima: Region  # (64, 2 tiles), as subtracted
    sums: Region  # (64, 2 warpgroups)
    peaks: Region  # the same
    inbox: Region  # over query: rows that other CTAs of the cluster have sent
    own: Region  # over the ring, and beyond it: this CTA's part of all rows
    masks: Region  # (stages, 4): which keys of a tile count
    scales: Region  # (stages, keys that are decoded here)
    staging: Region  # (2, keys that are decoded here): rows as they come
    sent: Region  # (2, 4): which of a warp's rows there are
    info: Region  # how many tiles a work tile has; a flag
    barriers: Region

    @property
    def nbytes(self) -> int:
        return self.barriers.end


@dataclass(frozen=True)
class Config:
    """``merge``: several CTAs have a split of a work tile's keys each; else a CTA has one after another to itself.
    ``prefetch``: a row is on its way to the L2 before there is room for it in shared memory. ``paged``: whether the
    keys of windows and the entries lie in pages. ``align``: bytes, at whose multiples rows start; ``divided``: the
    numbers of encoded ones, by a global scale. ``fp4``: the fields of a problem's ``Fp4``, the dtype by its name.
    ``sides``: 2 where neighbouring CTAs have two head blocks of a token and decode half of its rows each, else 1.
    ``once``: a CTA's share of the keys are its ``stages`` tiles."""

    dtype: Any
    dim: int
    keys: int  # of a tile, a multiple of 16 up to 64
    stages: int
    merge: bool
    prefetch: bool
    paged: tuple[bool, bool] = (False, False)
    format: str = "none"
    rope_dim: int = 0
    align: int = CHUNK
    divided: bool = False
    fp4: tuple[Any, ...] | None = None
    sides: int = 1
    once: bool = False

    @property
    def threads(self) -> int:
        return THREADS * (HALVES + 1)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def ring(self) -> Ring:
        return Ring(self.dtype, self.keys, self.dim, HALVES, self.stages)

    @property
    def half_bytes(self) -> int:
        """Half of the columns of a tile of keys."""
        return self.ring.stage_bytes // HALVES

    @property
    def row(self) -> Row:
        """Of the caches."""
        return Row(self.format, self.dim, self.rope_dim)

    @property
    def scale_bytes(self) -> int:
        """What follows the numbers of an encoded row: its scales, and zeros."""
        return 0 if self.row.plain else self.row.layout.size - self.row.layout.scales

    @property
    def staged(self) -> bool:
        """Whether encoded rows come by bulk copies, to memory of their own."""
        return not self.once and staged(self.row, self.align)

    @property
    def slot_bytes(self) -> int:
        """Of a row that is staged, and of what it may start behind a multiple of 16."""
        return -(-self.row.layout.size // CHUNK) * CHUNK if self.staged else 0

    @property
    def ahead(self) -> int:
        """Halves of a tile's scores that are under way before the products for the output of the tile before. With two
        tiles in memory, the tile before gives its place back while the other half is computed: what the scores after
        the next wait for is its copy. With more, the softmax is beside those products."""
        return 1 if self.stages == 2 else HALVES

    @property
    def p_bytes(self) -> int:
        """Probabilities of a tile."""
        return HEADS * ROW_BYTES

    @property
    def pitch(self) -> int:
        """Bytes of a row of a partial result: behind its output a chunk with its maximum and sum, by which eight rows
        do not collide in banks, either."""
        return self.dim * self.itemsize + CHUNK

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(HEADS, self.dim)

    @property
    def arrivals(self) -> list[int]:
        """How many arrivals complete a phase of each mbarrier, in the order of ``Meeting``; of the last one the launch
        says it, where CTAs meet."""
        return [
            32 * LOADERS if self.once else 32 * (CONSUMERS if self.merge else LOADERS) + 1,
            CONSUMERS,
            *[LOADERS * (33 if self.row.plain else 1)] * (HALVES * self.stages),
            *[CONSUMERS * self.sides] * (HALVES * self.stages),
            *[WARPS] * (2 * HALVES),
            *[1] * (STAGED * LOADERS * self.staged),
            *[1] * self.merge,
        ]

    @cached_property
    def shared(self) -> Shared:
        by_head = 0 if self.once else HEADS * 2 * 4
        query = Region(0, HEADS * self.dim * self.itemsize)
        ring = Region(query.end, self.stages * self.ring.stage_bytes)
        own = Region(ring.offset, HEADS * self.pitch if self.merge else 0)
        probabilities = Region(max(ring.end, own.end), 0 if self.once else HALVES * self.p_bytes)
        factors = Region(probabilities.end, by_head)
        maxima = Region(factors.end, by_head)
        sums = Region(maxima.end, by_head)
        peaks = Region(sums.end, by_head)
        sent = max((ctas - 1) * -(-HEADS // ctas) for ctas in range(1, MOST_CTAS + 1))
        inbox = Region(query.offset, sent * self.pitch)
        masks = Region(peaks.end, self.stages * LOADERS * 4)
        scales = Region(masks.end, self.stages * (self.keys // self.sides) * self.scale_bytes)
        staging = Region(scales.end, STAGED * (self.keys // self.sides) * self.slot_bytes)
        sent = Region(staging.end, STAGED * LOADERS * CHUNK if self.staged else 0)
        info = Region(sent.end, 16)
        return Shared(
            query, ring, probabilities, factors, maxima, sums, peaks, inbox, own, masks, scales, staging, sent, info,
            Region(info.end, (len(self.arrivals) + self.merge) * 8),
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes
