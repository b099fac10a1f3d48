"""What ``mma.py`` is compiled for, its shared memory, and what decode kernels of every architecture share of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.smem import CHUNK, RESERVED, SHARED, Region, itemsize
from torch_attnkit.cuda.workspace import SplitLayout

FLAG_BYTES = 16  # of the is-last-CTA flag, with its alignment


@dataclass(frozen=True)
class Results:
    """Results of a work tile, ``count`` of them, that the CTA combines: fp32, from the first byte of its memory on.

    O (count, heads, Dv) with rows of ``row_floats``, then row_max and row_sum (count, heads, 2).
    """

    count: int
    heads: int
    dim_v: int

    @property
    def row_floats(self) -> int:
        """Four more than Dv, so that eight rows do not collide in the banks."""
        return self.dim_v + 4

    @property
    def nbytes(self) -> int:
        return self.count * self.heads * (self.row_floats + 2) * 4


@dataclass(frozen=True)
class MmaShared:
    """The shared memory of a CTA of ``mma.py``."""

    ring: Region  # (warps, stages, K then V of a tile)
    results: Results  # over the ring, when it has drained: one for every warp
    query: Region  # (warps, Q), in the order in which lanes use it; empty where Q has its place in registers
    flag: Region

    @property
    def nbytes(self) -> int:
        return self.flag.end


@dataclass(frozen=True)
class MmaConfig:
    """What ``mma.py`` is compiled for. ``page``: keys of a page, 0 for a cache without pages."""

    dtype: Any
    dim: int
    dim_v: int
    heads: int  # query heads of a group, 8 or 16; fewer are padded
    keys: int  # of a tile, a multiple of 16
    warps: int
    stages: int
    page: int = 0
    combine: bool = False  # whether a second kernel combines splits, else the last CTA to arrive
    capacity: int = SHARED  # bytes of shared memory that the CTAs of an SM have together

    concurrent = False  # whether ``Scalars.concurrent`` can be more than 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def pitch(self) -> int:
        """Bytes of a row of K in shared memory."""
        return self.dim * self.itemsize + CHUNK

    @property
    def pitch_v(self) -> int:
        return self.dim_v * self.itemsize + CHUNK

    @property
    def stage_bytes(self) -> int:
        return self.keys * (self.pitch + self.pitch_v)

    @cached_property
    def shared(self) -> MmaShared:
        ring = Region(0, self.warps * self.stages * self.stage_bytes)
        results = Results(self.warps, self.heads, self.dim_v)
        in_registers = self.dim <= 256
        query = Region(
            max(ring.nbytes, results.nbytes),
            0 if in_registers else self.warps * self.heads * self.dim * self.itemsize,
        )
        return MmaShared(ring, results, query, Region(query.end, FLAG_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and, with 128 or 255 registers a thread, the register file allow."""
        threads = 512 if self.heads == 8 else 256
        return max(1, min(self.capacity // (self.shared_bytes + RESERVED), threads // self.threads))

    @property
    def prefetch(self) -> int:
        """Blocks of 16 columns of a tile that ``ldmatrix`` loads before they are used."""
        return (8 if self.dim <= 256 else 2) // (self.keys // 16)

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim_v)


@dataclass(frozen=True)
class Fp8KvConfig(MmaConfig):
    """``mma.py`` over caches of E4M3; ``dtype`` is that of q. A soft cap is compiled in: branches around it would be a
    quarter of the instructions."""

    capped: bool = False
    scales: tuple[bool, ...] = ()  # which of q's, k's and v's there are; (): none

    @property
    def itemsize(self) -> int:
        return 1

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and the register file allow; pages of one key take more than 128 registers a thread."""
        threads = 512 if self.heads == 8 and self.page != 1 else 256
        return max(1, min(self.capacity // (self.shared_bytes + RESERVED), threads // self.threads))
