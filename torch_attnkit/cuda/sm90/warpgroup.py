"""Sizes of ``wgmma``: what plans and configs of Hopper kernels count with, without cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..smem import itemsize

ROWS = 64  # M of a product
THREADS = 128  # of a warpgroup
WARPS = 4  # of a warpgroup
ROW_BYTES = 128  # of an operand's rows in shared memory, as wide as a swizzle can be


@dataclass(frozen=True)
class KVRing:
    """``stages`` tiles of ``keys`` rows in shared memory, their ``dim`` columns in ``halves`` equal parts, which
    warpgroups multiply apart."""

    dtype: Any
    keys: int
    dim: int
    halves: int
    stages: int

    @property
    def part(self) -> int:
        """Columns of a part."""
        return self.dim // self.halves

    @property
    def stage_bytes(self) -> int:
        return self.keys * self.dim * itemsize(self.dtype)
