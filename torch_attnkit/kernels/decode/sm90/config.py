"""What the ``wgmma`` kernels of Hopper are compiled for, and their shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, ROWS, THREADS, WARPS, KVRing
from torch_attnkit.cuda.smem import CHUNK, Region, fit, itemsize
from torch_attnkit.cuda.workspace import SplitLayout

from ..config import FLAG_BYTES, Results

COUNTERS = 2  # of a group that ``combine_cooperative.py`` combines: CTAs that have arrived, and CTAs past the wait
PENDING_BYTES = 64  # two groups of which a CTA has a split


@dataclass(frozen=True)
class WgmmaShared:
    """The shared memory of a CTA of ``wgmma.py``."""

    query: Region
    ring: Region
    sums: Region  # where two warpgroups exchange partial scores; empty where there is one
    results: Results  # over all of these, when they have been read
    flag: Region

    @property
    def nbytes(self) -> int:
        return self.flag.end


@dataclass(frozen=True)
class WgmmaConfig:
    """What ``wgmma.py`` is compiled for; D and Dv are equal, and a multiple of 64.

    A tile of K and one of V are a stage each of the ring, or one for both where V is K (``same``).
    """

    dtype: Any
    dim: int
    keys: int
    stages: int
    page: int = 0
    same: bool = False
    combine: bool = False

    heads = ROWS
    concurrent = True

    @property
    def dim_v(self) -> int:
        return self.dim

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def halves(self) -> int:
        """Warpgroups, each with its part of the columns: 64 rows of more than 256 exceed one warpgroup's registers."""
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
        results = Results(1, ROWS, self.dim)
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
    """The shared memory of a CTA of ``mla.py``."""

    query: Region
    ring: Region
    probabilities: Region  # (stages of P, 64 heads), as the second product reads them
    factors: Region  # of the output: (heads, stages of P)
    maxima: Region  # (heads, score warpgroups)
    last: Region  # row_max and row_sum of the second score warpgroup, then of both: (heads, 2)
    barriers: Region
    pending: Region  # what ``combine_cooperative.py`` keeps of a CTA's splits

    @property
    def nbytes(self) -> int:
        return self.pending.end


@dataclass(frozen=True)
class MlaConfig:
    """What ``mla.py`` is compiled for: values are the first ``dim_v`` of a key's ``dim`` columns, 512/512 or 576/512.

    ``same``: one tensor has both; else a stage is a tile of K and one of V, in rings one behind the other. A tile has
    up to 64 keys, and as many columns of P: 32 or 64.
    """

    dtype: Any
    dim: int
    dim_v: int
    keys: int
    stages: int
    page: int = 0
    same: bool = True

    combine = False  # CTAs of the same launch do
    heads = ROWS
    concurrent = True
    halves = 2  # of the values' columns, a value warpgroup each
    score_warpgroups = 2  # which take tiles alternately
    p_stages = 2  # buffers of probabilities
    blocks_per_sm = 1  # whose four warpgroups have all registers

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def threads(self) -> int:
        return THREADS * (self.score_warpgroups + self.halves)

    @cached_property
    def key_ring(self) -> KVRing:
        """As the scores read it: halves, or where the columns make none of the same size, blocks of 64 columns."""
        parts = 2 if self.dim == self.dim_v else self.dim // self.box_columns
        return KVRing(self.dtype, self.keys, self.dim, parts, self.stages)

    @cached_property
    def value_ring(self) -> KVRing:
        """As the second product reads it; a stage may have other columns behind these."""
        return KVRing(self.dtype, self.keys, self.dim_v, self.halves, self.stages)

    @property
    def value_columns(self) -> int:
        """Columns of a stage that has values."""
        return self.dim if self.same else self.dim_v

    @property
    def values_offset(self) -> int:
        """Bytes from the ring to the stages that have the values."""
        return 0 if self.same else self.stages * self.key_ring.stage_bytes

    @property
    def ring_bytes(self) -> int:
        """Of both."""
        return self.values_offset + self.stages * self.keys * self.value_columns * self.itemsize

    @property
    def box_columns(self) -> int:
        """Of a TMA box, 128 bytes: each warp of a value warpgroup loads as many of every row."""
        return ROW_BYTES // self.itemsize

    @property
    def box(self) -> int:
        """Keys of a TMA box: of a tile that lie in one page whatever the tile."""
        return math.gcd(self.keys, self.page) if self.page else self.keys

    @property
    def boxes(self) -> int:
        """Of a tile, for each 64 columns."""
        return self.keys // self.box

    @property
    def p_keys(self) -> int:
        """Columns of a buffer of probabilities, of which as many are used as a tile has keys."""
        return 32 if self.keys <= 32 else 64

    @property
    def p_row_bytes(self) -> int:
        return self.p_keys * self.itemsize

    @property
    def p_bytes(self) -> int:
        """Probabilities of a tile."""
        return self.heads * self.p_row_bytes

    @property
    def arrivals(self) -> list[int]:
        """Arrivals that complete a phase of each mbarrier, in the order of ``MlaBarriers``."""
        value_warps = WARPS * self.halves
        return [
            self.threads,
            *[value_warps] * self.stages,
            *[WARPS] * self.p_stages,
            *[value_warps] * self.p_stages,
            *[WARPS] * self.score_warpgroups,
        ]

    @cached_property
    def shared(self) -> MlaShared:
        sizes = dict(
            query=self.heads * self.dim * self.itemsize,
            ring=self.ring_bytes,
            probabilities=self.p_stages * self.p_bytes,
            factors=self.heads * self.p_stages * 4,
            maxima=self.heads * self.score_warpgroups * 4,
            last=self.heads * 2 * 4,
            barriers=len(self.arrivals) * 8,
        )
        regions, end = {}, 0
        for name, nbytes in sizes.items():
            regions[name] = Region(end, nbytes)
            end += nbytes
        return MlaShared(**regions, pending=Region(-(-end // CHUNK) * CHUNK, PENDING_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim_v)
