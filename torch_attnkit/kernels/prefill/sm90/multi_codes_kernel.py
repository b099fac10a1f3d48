"""What to compile for blocks of queries over a cache of E4M3 on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from .cached_kernel import Sequences
from .multi_codes import MultiCodes, SharedMemory
from .multi_codes_types import TURNING_WARPS, Config, Inputs, arguments
from .multi_persistent import Persistent
from .multi_schedule import Part
from .multi_types import Loads, Outputs, Scalars, meeting


class CachedCodes(Fixed):
    """``MultiCodes`` as persistent CTAs use it: a dense batch."""

    loader_warps, turning_warps = 1, TURNING_WARPS

    def __init__(self, config: Config):
        codes = self.codes = MultiCodes(config)
        self.multi, self.layouts, self.attend = codes.multi, codes.layouts, codes.attend
        self.loads, self.prefetch, self.shared_memory = codes.loads, codes.prefetch, codes.shared_memory

    def load(self, loads: Loads, ins: Inputs, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.codes.produce(loads, part.tile, smem, fills)

    def turn(self, scalars: Scalars, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.codes.turn(scalars, part.tile, smem, fills)

    def rows(self, ins: Inputs, outs: Outputs, part: Part) -> tuple[Inputs, Outputs]:
        return ins, outs


def trace_cached(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the caches start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return MultiCodes(config), arguments(config)


def trace_cached_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for batches whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(config)
    kernel = CachedCodes(config)
    return Persistent(config, kernel, Sequences(kernel.multi)), [*rest, meeting(), stream]
