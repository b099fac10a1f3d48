"""What to compile for blocks of queries over pages of E4M3 on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from .multi_codes import SharedMemory
from .multi_codes_types import TURNING_WARPS
from .multi_persistent import Persistent
from .multi_schedule import Part
from .multi_types import Outputs, Scalars, meeting
from .page_loads import Loads
from .paged_codes_types import Config, Inputs, Rows, arguments
from .paged_kernel import Sequences
from .paged_multi_codes import PagedMultiCodes


class PagesOfCodes(Fixed):
    """``PagedMultiCodes`` as persistent CTAs use it."""

    loader_warps, turning_warps = 1, TURNING_WARPS

    def __init__(self, config: Config):
        paged = self.paged = PagedMultiCodes(config)
        self.multi, self.layouts, self.attend = paged.multi, paged.codes.layouts, paged.codes.attend
        self.loads, self.prefetch, self.shared_memory = paged.loads, paged.keys.prefetch, paged.codes.shared_memory

    def load(self, loads: Loads, ins: Inputs, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.paged.produce(loads, ins, part.tile, part.sequence, smem, fills)

    def turn(self, scalars: Scalars, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.paged.codes.turn(scalars, part.tile, smem, fills)

    def rows(self, ins: Inputs, outs: Outputs, part: Part) -> tuple[Rows, Outputs]:
        return self.paged.rows(ins, outs, part.tile, part.sequence)


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return PagedMultiCodes(config), arguments(config)


def trace_paged_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for few queries of each sequence, whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(config)
    return Persistent(config, PagesOfCodes(config), Sequences(config)), [*rest, meeting(), stream]
