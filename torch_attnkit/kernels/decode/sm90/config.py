"""What the ``wgmma`` kernels of Hopper are compiled for, and their shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS, WARPS, KVRing
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK, Region, fit, itemsize
from torch_attnkit.cuda.workspace import SplitLayout

from ..config import FLAG_BYTES, Results

COUNTERS = 2  # of a group that ``together.py`` joins: blocks that have come, and blocks that wait no longer
PENDING_BYTES = 64  # two groups of which a block has a split


@dataclass(frozen=True)
class WgmmaShared:
    """The shared memory of a block."""

    query: Region
    ring: Region
    sums: Region  # where two warpgroups exchange their sums over their columns; empty where there is one
    results: Results  # over all of these, when they have been read
    flag: Region

    @property
    def nbytes(self) -> int:
        return self.flag.end


@dataclass(frozen=True)
class WgmmaConfig:
    """What is fixed at compile time; D and Dv are equal, and a multiple of 64.

    A tile of K and one of V are a stage each of the ring, or one for both where V is K (``same``).
    """

    dtype: Any
    dim: int
    keys: int
    stages: int
    page: int = 0
    same: bool = False
    combine: bool = False

    heads = HEADS
    abreast = True

    @property
    def dim_v(self) -> int:
        return self.dim

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def halves(self) -> int:
        """Warpgroups, each with its part of the columns: 64 rows of more than 256 fill no warpgroup's registers."""
        return 2 if self.dim > 256 else 1

    @property
    def threads(self) -> int:
        return THREADS * self.halves

    @cached_property
    def ring(self) -> KVRing:
        return KVRing(self.dtype, self.keys, self.dim, self.halves, self.stages)

    @cached_property
    def shared(self) -> WgmmaShared:
        query = Region(0, self.heads * self.dim * self.itemsize)
        ring = Region(query.end, self.stages * self.ring.stage_bytes)
        sums = Region(ring.end, 0 if self.halves == 1 else 2 * self.heads * self.keys * 4)
        results = Results(1, HEADS, self.dim)
        return WgmmaShared(query, ring, sums, results, Region(max(sums.end, results.nbytes), FLAG_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and, with 255 registers a thread, the register file allow."""
        return max(1, min(fit(self.shared_bytes), 256 // self.threads))

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim)


@dataclass(frozen=True)
class MlaShared:
    """The shared memory of a block."""

    query: Region
    ring: Region
    probabilities: Region  # (stages of P, 64 heads), as the second product reads them: rows of 128 bytes
    factors: Region  # of the output: (heads, stages of P)
    maxima: Region  # (heads, score warpgroups)
    last: Region  # row_max and row_sum of the second score warpgroup, then of both: (heads, 2)
    barriers: Region
    pending: Region  # what ``together.py`` keeps of a block's splits

    @property
    def nbytes(self) -> int:
        return self.pending.end


@dataclass(frozen=True)
class MlaConfig:
    """What is fixed at compile time: 512 columns, up to 64 keys a tile."""

    dtype: Any
    dim: int
    keys: int
    stages: int
    page: int = 0
    same: bool = True  # V is K, always

    combine = False  # blocks of the same launch do
    heads = HEADS
    abreast = True
    halves = 2  # of the columns, a value warpgroup each
    score_warpgroups = 2  # tiles in turn
    p_stages = 2  # buffers of probabilities

    @property
    def dim_v(self) -> int:
        return self.dim

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def threads(self) -> int:
        return THREADS * (self.score_warpgroups + self.halves)

    @cached_property
    def ring(self) -> KVRing:
        return KVRing(self.dtype, self.keys, self.dim, self.halves, self.stages)

    @property
    def box_columns(self) -> int:
        """Of a box of TMA, 128 bytes: a warp of a value warpgroup loads as many of every row."""
        return ROW_BYTES // self.itemsize

    @property
    def box(self) -> int:
        """Keys that TMA loads at once: of a tile that lie in one page whatever the tile."""
        return math.gcd(self.keys, self.page) if self.page else self.keys

    @property
    def boxes(self) -> int:
        """Of a tile, for each 64 columns."""
        return self.keys // self.box

    @property
    def p_bytes(self) -> int:
        """Probabilities of a tile."""
        return self.heads * ROW_BYTES

    @property
    def arrivals(self) -> list[int]:
        """How many arrivals complete a phase of each mbarrier, in the order of ``Meeting``."""
        values = WARPS * self.halves
        return [
            self.threads,
            *[values] * self.stages,
            *[WARPS] * self.p_stages,
            *[values] * self.p_stages,
            *[WARPS] * self.score_warpgroups,
        ]

    @cached_property
    def shared(self) -> MlaShared:
        query = Region(0, self.heads * self.dim * self.itemsize)
        ring = Region(query.end, self.stages * self.ring.stage_bytes)
        probabilities = Region(ring.end, self.p_stages * self.p_bytes)
        factors = Region(probabilities.end, self.heads * self.p_stages * 4)
        maxima = Region(factors.end, self.heads * self.score_warpgroups * 4)
        last = Region(maxima.end, self.heads * 2 * 4)
        barriers = Region(last.end, len(self.arrivals) * 8)
        pending = Region(-(-barriers.end // CHUNK) * CHUNK, PENDING_BYTES)
        return MlaShared(query, ring, probabilities, factors, maxima, last, barriers, pending)

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and the register file allow."""
        return max(1, min(fit(self.shared_bytes), 256 // self.threads))

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim)
