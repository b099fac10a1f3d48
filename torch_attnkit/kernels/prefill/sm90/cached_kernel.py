"""What to compile for queries at the end of a cache on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from .multi import Multi, SharedMemory
from .multi_persistent import Persistent
from .multi_schedule import Part
from .multi_types import Config, Inputs, Loads, Outputs, Scalars, arguments, meeting


class Sequences(Fixed):
    """Those of a dense batch, as persistent CTAs see them."""

    one_tile = True

    def __init__(self, multi: Multi):
        self.sequence, self.group = multi.sequence, multi.group

    def count(self, ins: Any) -> Int32:
        return Int32(ins.q.shape[0])

    def kv_heads(self, ins: Any) -> Int32:
        return Int32(ins.k.shape[1])

    def batch(self, b: Int32) -> Int32:
        return b


class Cached(Fixed):
    """``Multi`` as persistent CTAs use it."""

    loader_warps, turning_warps = 1, 0

    def __init__(self, config: Config):
        multi = self.multi = Multi(config)
        self.loads, self.prefetch, self.shared_memory = multi.loads, multi.prefetch, multi.shared_memory
        self.layouts, self.attend = multi.layouts, multi.attend_tile

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
    kernel = Cached(config)
    return Persistent(config, kernel, Sequences(kernel.multi)), [*rest, meeting(), stream]
