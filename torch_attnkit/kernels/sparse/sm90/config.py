"""Compile-time configuration of the Hopper kernel and its shared-memory layout."""

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

from .plan import MOST_CTAS, bulk_copied

LANES = 32
COLUMN_CHUNKS = ROW_BYTES // CHUNK  # of a row of a block of columns
HALVES = 2  # of O's columns, one per consumer warpgroup
LOADERS = WARPS  # warps
CONSUMERS = HALVES * WARPS  # warps
CONSUMER_THREADS = HALVES * THREADS
STAGING_TILES = 2  # one arriving, one being dequantised


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory of a CTA; ``receive`` aliases Q, ``partials`` the K/V ring."""

    query: Region
    ring: Region
    probabilities: Region  # (2 tiles, 64 heads), rows of 128 bytes
    factors: Region  # that rescale O, (64, 2 tiles)
    maxima: Region  # (64, 2 tiles), as subtracted
    sums: Region  # (64, 2 warpgroups)
    peaks: Region  # the same
    receive: Region  # over query: peers' partials
    partials: Region  # over the ring and beyond: this CTA's partials
    masks: Region  # (stages, 4): validity of a tile's keys
    scales: Region  # (stages, own keys)
    staging: Region  # (2, own keys): raw rows
    row_bits: Region  # (2, 4): validity of a warp's rows
    info: Region  # how many tiles a work tile has; a flag
    barriers: Region

    @property
    def nbytes(self) -> int:
        return self.barriers.end


@dataclass(frozen=True)
class Config:
    """``split_kv``: several CTAs share a work tile's keys; else CTAs are persistent over work tiles. ``prefetch``: rows
    are prefetched to L2 before a slot is free. ``paged``: (window, entries) caches in pages. ``align``: alignment of
    cache rows in bytes. ``divided``: encoded rows have a global scale. ``fp4``: fields of the problem's ``Fp4``, the
    dtype by name. ``sides``: 2 where a pair of CTAs has two head blocks of a token and dequantises half of its rows
    each, else 1. ``single_pass``: the CTA's keys fit in its ``stages`` tiles."""

    dtype: Any
    dim: int
    keys: int  # of a tile, a multiple of 16 up to 64
    stages: int
    split_kv: bool
    prefetch: bool
    paged: tuple[bool, bool] = (False, False)
    format: str = "none"
    rope_dim: int = 0
    align: int = CHUNK
    divided: bool = False
    fp4: tuple[Any, ...] | None = None
    sides: int = 1
    single_pass: bool = False

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
        """Bytes of a ring slot: half of the columns of a K/V tile."""
        return self.ring.stage_bytes // HALVES

    @property
    def row(self) -> Row:
        """Row format of the caches."""
        return Row(self.format, self.dim, self.rope_dim)

    @property
    def scale_bytes(self) -> int:
        """Bytes behind the values of an encoded row: scales and padding."""
        return 0 if self.row.plain else self.row.layout.size - self.row.layout.scales

    @property
    def bulk(self) -> bool:
        """Whether encoded rows are staged in shared memory by bulk copies."""
        return not self.single_pass and bulk_copied(self.row, self.align)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a staged row, with room for a start 8 bytes past a multiple of 16."""
        return -(-self.row.layout.size // CHUNK) * CHUNK if self.bulk else 0

    @property
    def ahead(self) -> int:
        """Half tiles of S issued before P V of the previous tile. With two tiles in the ring, P V goes between the
        halves, so that the previous tile's slot is refilled during the second; with more, the softmax overlaps P V."""
        return 1 if self.stages == 2 else HALVES

    @property
    def p_bytes(self) -> int:
        """Bytes of one tile of P."""
        return HEADS * ROW_BYTES

    @property
    def pitch(self) -> int:
        """Row pitch of a partial result: O, then 16 bytes with row_max and row_sum, which also makes 8 rows
        conflict-free."""
        return self.dim * self.itemsize + CHUNK

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(HEADS, self.dim)

    @property
    def arrivals(self) -> list[int]:
        """Arrivals per phase of each mbarrier, in the order of ``Barriers``. ``Barriers.read`` follows, whose count is
        known at launch."""
        return [
            32 * LOADERS if self.single_pass else 32 * (CONSUMERS if self.split_kv else LOADERS) + 1,
            CONSUMERS,
            *[LOADERS * (33 if self.row.plain else 1)] * (HALVES * self.stages),
            *[CONSUMERS * self.sides] * (HALVES * self.stages),
            *[WARPS] * (2 * HALVES),
            *[1] * (STAGING_TILES * LOADERS * self.bulk),
            *[1] * self.split_kv,
        ]

    @cached_property
    def shared(self) -> SharedMemory:
        by_head = 0 if self.single_pass else HEADS * 2 * 4
        query = Region(0, HEADS * self.dim * self.itemsize)
        ring = Region(query.end, self.stages * self.ring.stage_bytes)
        partials = Region(ring.offset, HEADS * self.pitch if self.split_kv else 0)
        probabilities = Region(max(ring.end, partials.end), 0 if self.single_pass else HALVES * self.p_bytes)
        factors = Region(probabilities.end, by_head)
        maxima = Region(factors.end, by_head)
        sums = Region(maxima.end, by_head)
        peaks = Region(sums.end, by_head)
        sent = max((ctas - 1) * -(-HEADS // ctas) for ctas in range(1, MOST_CTAS + 1))
        receive = Region(query.offset, sent * self.pitch)
        masks = Region(peaks.end, self.stages * LOADERS * 4)
        scales = Region(masks.end, self.stages * (self.keys // self.sides) * self.scale_bytes)
        staging = Region(scales.end, STAGING_TILES * (self.keys // self.sides) * self.slot_bytes)
        row_bits = Region(staging.end, STAGING_TILES * LOADERS * CHUNK if self.bulk else 0)
        info = Region(row_bits.end, 16)
        return SharedMemory(
            query, ring, probabilities, factors, maxima, sums, peaks, receive, partials, masks, scales, staging,
            row_bits, info, Region(info.end, (len(self.arrivals) + self.split_kv) * 8),
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes
