"""What ``latent.py`` is compiled for, and its shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.sm90.warpgroup import KVRing as Ring
from torch_attnkit.cuda.smem import CHUNK, Region, fit, itemsize
from torch_attnkit.cuda.workspace import SplitLayout

from .config import PENDING_BYTES, MlaConfig, MlaShared


@dataclass(frozen=True)
class LatentConfig:
    """What is fixed at compile time: 576 columns, of which the first 512 are values, and 32 keys a tile.

    ``same``: one tensor has both, else a stage is a tile of K and one of V, which lie in rings one after the other.
    ``columns`` are those that a role multiplies, in ``halves`` parts (``mla.py``'s name): the scores have all, in
    blocks of 64, the values theirs, a half a warpgroup.
    """

    dtype: Any
    dim: int
    dim_v: int
    keys: int
    stages: int
    page: int = 0
    same: bool = True
    columns: int = 576
    halves: int = 9

    combine = False  # blocks of the same launch do
    heads = HEADS
    abreast = True
    score_warpgroups = MlaConfig.score_warpgroups
    p_stages = MlaConfig.p_stages

    @property
    def of_values(self) -> LatentConfig:
        """As the value warpgroups have it."""
        return replace(self, columns=self.dim_v, halves=MlaConfig.halves)

    @property
    def _roles(self) -> MlaConfig:
        """The warpgroups and how they meet are those of ``mla.py``."""
        return MlaConfig(self.dtype, self.dim, self.keys, self.stages)

    @property
    def threads(self) -> int:
        return self._roles.threads

    @property
    def arrivals(self) -> list[int]:
        return self._roles.arrivals

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def ring(self) -> Ring:
        """Of the role's columns; beside them a stage may have others."""
        return Ring(self.dtype, self.keys, self.columns, self.halves, self.stages)

    @property
    def value_columns(self) -> int:
        """Of a row of the ring that has the values."""
        return self.dim if self.same else self.dim_v

    @property
    def values_offset(self) -> int:
        """Bytes from the ring to that which has the values."""
        return 0 if self.same else self.stages * self.keys * self.dim * self.itemsize

    @property
    def ring_bytes(self) -> int:
        """Of both."""
        return self.values_offset + self.stages * self.keys * self.value_columns * self.itemsize

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
    def blocks_per_sm(self) -> int:
        """As shared memory allows: one."""
        return max(1, fit(self.shared_bytes))

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim_v)
