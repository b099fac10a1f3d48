"""What ``latent.py`` is compiled for, and its shared memory. Imports no cutlass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config import FLAG_BYTES, Region, Results, SplitLayout, fit, itemsize
from .config import HEADS, ROW_BYTES, THREADS, WARPS, MlaShared, Ring


@dataclass(frozen=True)
class LatentConfig:
    """What is fixed at compile time: 576 columns, of which the first 512 are values, and 32 keys a tile.

    ``same``: one tensor has both, else a stage is a tile of K and one of V, which lie in rings one after the other.
    ``halves`` is ``mla.py``'s name for the parts of the columns that a product takes at once: nine of 64.
    """

    dtype: Any
    dim: int
    dim_v: int
    keys: int
    stages: int
    page: int = 0
    same: bool = True
    combine: bool = False

    heads = HEADS
    abreast = True
    halves = 9
    value_warpgroups = 2  # with a half of the values' columns each
    score_warpgroups = 2  # tiles in turn
    p_stages = 2  # buffers of probabilities

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def threads(self) -> int:
        return THREADS * (self.score_warpgroups + self.value_warpgroups)

    @cached_property
    def ring(self) -> Ring:
        return Ring(self.dtype, self.keys, self.dim, self.halves, self.stages)

    @property
    def value_columns(self) -> int:
        """Of a row of the ring that has the values."""
        return self.dim if self.same else self.dim_v

    @property
    def values_offset(self) -> int:
        """Bytes from the ring to that which has the values."""
        return 0 if self.same else self.stages * self.ring.stage_bytes

    @property
    def ring_bytes(self) -> int:
        """Of both."""
        return self.values_offset + self.stages * self.keys * self.value_columns * self.itemsize

    @property
    def own(self) -> int:
        """Columns of a value warpgroup."""
        return self.dim_v // self.value_warpgroups

    @property
    def box_columns(self) -> int:
        """Of a box of TMA, 128 bytes: a warp of a value warpgroup loads as many of every row, and one those beyond."""
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
        """Probabilities of a tile, rows of as many bytes as they have: 64."""
        return self.heads * self.keys * self.itemsize

    @property
    def arrivals(self) -> list[int]:
        """How many arrivals complete a phase of each mbarrier, in the order of ``mla.py``'s ``Meeting``."""
        values = WARPS * self.value_warpgroups
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
        ring = Region(query.end, self.ring_bytes)
        probabilities = Region(ring.end, self.p_stages * self.p_bytes)
        factors = Region(probabilities.end, self.heads * self.p_stages * 4)
        maxima = Region(factors.end, self.heads * self.score_warpgroups * 4)
        last = Region(maxima.end, self.heads * 2 * 4)
        barriers = Region(last.end, len(self.arrivals) * 8)
        results = Results(1, self.heads, self.dim_v)
        flag = Region(max(barriers.end, results.nbytes), FLAG_BYTES)
        return MlaShared(query, ring, probabilities, factors, maxima, last, barriers, results, flag)

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and the register file allow."""
        return max(1, min(fit(self.shared_bytes), 256 // self.threads))

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim_v)
