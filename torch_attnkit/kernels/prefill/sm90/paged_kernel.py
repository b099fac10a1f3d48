"""What to compile for blocks of queries over pages on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from ..blocks import Sequence
from . import paged_blocks
from .dynamic import Dynamic
from .dynamic_types import draws
from .multi import SharedMemory
from .multi_persistent import Persistent
from .multi_schedule import Part
from .multi_types import Layouts, Outputs, Scalars, meeting
from .page_loads import Loads
from .paged_dynamic import PagedBatch
from .paged_multi import PagedMulti
from .paged_types import Config, Inputs, Rows, arguments


class Sequences(Fixed):
    """Packed sequences, and one of what lies behind the last, as persistent CTAs see them."""

    one_tile = False

    def __init__(self, config: Any):
        self.c, self.group = config, paged_blocks.group_of

    def count(self, ins: Any) -> Int32:
        return Int32(ins.cu_q.shape[0])

    def kv_heads(self, ins: Any) -> Int32:
        return Int32(ins.k.shape[2])

    def sequence(self, ins: Any, scalars: Scalars, b: Int32) -> Sequence:
        return paged_blocks.sequence(self.c, ins, b)

    def batch(self, b: Int32) -> Int32:
        return Int32(0)


class Pages(Fixed):
    """``PagedMulti`` as persistent CTAs use it."""

    turning_warps = 0

    def __init__(self, config: Config):
        self.paged = PagedMulti(config)
        self.multi, self.loader_warps = self.paged.multi, config.loader_warps
        self.layouts, self.attend = self.multi.layouts, self.multi.attend_tile
        self.prefetch, self.shared_memory = self.paged.keys.prefetch, self.paged.shared_memory

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        return self.paged.keys.loads(ins)

    def load(self, loads: Loads, ins: Inputs, part: Part, smem: SharedMemory, fills: Int32) -> None:
        self.paged.produce(loads, ins, part.tile, part.sequence, smem, fills)

    def turn(self, scalars: Scalars, part: Part, smem: SharedMemory, fills: Int32) -> None:
        """Nothing is turned around."""

    def rows(self, ins: Inputs, outs: Outputs, part: Part) -> tuple[Rows, Outputs]:
        return self.paged.rows(ins, outs, part.tile)


def trace_paged(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """Rows of q and of the pages start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **signature)
    return PagedMulti(config), arguments(dtype, config)


def trace_paged_persistent(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for few queries of each sequence, whose lengths differ."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Persistent(config, Pages(config), Sequences(config)), [*rest, meeting(), stream]


def trace_paged_dynamic(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The same for many queries, whose work tiles persistent CTAs draw."""
    config = Config(fake.dtype(dtype), **signature)
    *rest, stream = arguments(dtype, config)
    return Dynamic(config, PagedBatch(config)), [*rest, draws(), stream]
