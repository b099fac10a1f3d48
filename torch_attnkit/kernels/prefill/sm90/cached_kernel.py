"""What to compile for queries at the end of a cache on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from ..blocks import Sequence
from .multi import Multi, SharedMemory
from .multi_persistent import Persistent
from .multi_schedule import Part
from .multi_types import Config, Inputs, Loads, Outputs, Scalars, arguments, meeting


class Cached(Fixed):
    """``Multi`` as persistent CTAs use it: a dense batch."""

    loader_warps, turning_warps, one_tile = 1, 0, True

    def __init__(self, config: Config):
        multi = self.multi = Multi(config)
        self.loads, self.prefetch, self.shared_memory = multi.loads, multi.prefetch, multi.shared_memory
        self.layouts, self.attend, self.group = multi.layouts, multi.attend_tile, multi.group

    def count(self, ins: Inputs) -> Int32:
        return Int32(ins.q.shape[0])

    def kv_heads(self, ins: Inputs) -> Int32:
        return Int32(ins.k.shape[1])

    def sequence(self, ins: Inputs, scalars: Scalars, b: Int32) -> Sequence:
        return self.multi.sequence(ins, scalars, b)

    def batch(self, b: Int32) -> Int32:
        return b

    def load(self, loads: Loads, ins: Inputs, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.multi.produce(loads, part.tile, smem, fills)

    def turn(self, scalars: Scalars, part: Part, smem: SharedMemory, fills: Int32) -> None:
        """Nothing is turned around."""

    def rows(self, ins: Inputs, outs: Outputs, part: Part) -> tuple[Inputs, Outputs]:
        return ins, outs


def trace_cached(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the caches start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return Multi(config), arguments(dtype, config)


def trace_cached_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for batches whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Persistent(config, Cached(config), Cached(config)), [*rest, meeting(), stream]
