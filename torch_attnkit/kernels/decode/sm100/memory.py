"""What a CTA of the Blackwell decode kernel has in shared memory, in tensors and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.warp_ops import thread_index

from ..schedule import Visible
from .config import PRODUCT_WARP, SOFTMAX_THREADS, THREADS
from .roles import Cta, CtaTile, Layouts, Next

T = TypeVar("T")


class Kept(Fixed, Generic[T]):
    """A tuple of numbers that each warp leaves in shared memory, where it costs the softmax no registers."""

    def __init__(self, kind: type[T], sNumbers: cute.Tensor):
        self.kind, self.sNumbers = kind, sNumbers  # (numbers, warps)

    def put(self, values: T) -> None:
        warp = thread_index() >> 5
        with cute.arch.elect_one():
            for i, value in enumerate(values):
                self.sNumbers[i, warp] = value
        cute.arch.sync_warp()

    def get(self) -> T:
        warp = thread_index() >> 5
        got = self.kind(*(self.sNumbers[i, warp] for i in range(len(self.kind._fields))))
        cute.arch.sync_warp()
        return got


@dataclass
class Memory(Fixed):
    """Barriers, the ring, and tensors in shared memory; ``*_at`` are addresses."""

    # mbarriers
    query: cute.Pointer  # Q is there
    scores: cute.Pointer  # one for each buffer of S'
    values: cute.Pointer  # a tile of V is there, unless V is K
    probabilities: cute.Pointer  # P' is there, and O' in step with it
    output: cute.Pointer  # O' is there
    ring: Ring
    # between warps, and from one work tile to the next
    cta: Kept[Cta]
    next: Kept[Next]
    tile: Kept[CtaTile]
    keys: Kept[Visible]
    flag_at: Int32  # a word by which the CTA's threads agree
    # operands
    query_at: Int32
    p_at: Int32
    ring_at: Int32
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sP: cute.Tensor
    sBoxes: cute.Tensor
    # statistics of the softmax
    sShift: cute.Tensor  # (heads), what is added to a head's scores, in powers of two
    sChange: cute.Tensor  # (heads), of the shift, in this tile
    sFactor: cute.Tensor  # (heads), two to that
    sWarps: cute.Tensor  # (heads * 4), maxima or sums of the four warps
    # results, which the cluster reads
    sStat: cute.Tensor  # (heads * 2), a work tile's row_max and row_sum
    sO: cute.Tensor  # (heads * Dv)


@cute.jit
def allocate(config: cutlass.Constexpr, layouts: Layouts, warp: Int32):
    """Lay out shared memory, set up the barriers and take tensor memory; the caller meets the cluster then."""
    c = config
    memory = cutlass.memory.SmemAllocator()
    large = memory.allocate(c.shared.nbytes, 1024).toint()
    query_at, p_at, ring_at = c.shared.query.at(large), c.shared.probabilities.at(large), c.shared.ring.at(large)

    def staged(at: Int32, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.make_ptr(c.dtype, at, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

    def floats(count: int) -> cute.Tensor:
        return memory.allocate_tensor(Float32, cute.make_layout(count), 16)

    def kept(kind: Any) -> Any:
        return Kept(kind, memory.allocate_tensor(Int32, cute.make_layout((len(kind._fields), THREADS // 32)), 16))

    cta, following, tile, keys = kept(Cta), kept(Next), kept(CtaTile), kept(Visible)
    # How many there are, and how many arrivals complete a phase.
    counts = {
        "query": (1, 1), "scores": (2, 1), "values": (1, 1), "probabilities": (1, SOFTMAX_THREADS // 32),
        "output": (1, 1),
    }  # fmt: skip
    single = {name: memory.allocate_array(cutlass.Int64, stages) for name, (stages, _) in counts.items()}
    ring = Ring(*(memory.allocate_array(cutlass.Int64, c.stages) for _ in range(2)), c.stages)
    flag_at, base = memory.allocate(16, 16).toint(), memory.allocate(4, 4)
    if warp == 0:
        with cute.arch.elect_one():
            for name, (stages, arrivals) in counts.items():
                for i in range(stages):
                    cute.arch.mbarrier_init(single[name] + i, arrivals)
            for i in range(c.stages):
                cute.arch.mbarrier_init(ring.full + i, 1)
                cute.arch.mbarrier_init(ring.empty + i, c.sides)
    if warp == PRODUCT_WARP:
        cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
    rows = cute.make_ptr(Float32, c.shared.results.at(large), cute.AddressSpace.smem, assumed_align=16)
    return Memory(
        **single,
        ring=ring,
        cta=cta,
        next=following,
        tile=tile,
        keys=keys,
        flag_at=flag_at,
        query_at=query_at,
        p_at=p_at,
        ring_at=ring_at,
        sQ=staged(query_at, layouts.q),
        sK=staged(ring_at, layouts.k),
        sV=staged(ring_at, layouts.v),
        sP=staged(p_at, layouts.p),
        sBoxes=staged(ring_at, layouts.boxes),
        sShift=floats(c.heads),
        sChange=floats(c.heads),
        sFactor=floats(c.heads),
        sWarps=floats(c.heads * 4),
        sStat=floats(c.heads * 2),
        sO=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim_v)),
    )
