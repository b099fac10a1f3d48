"""What a CTA of the kernel has in shared memory, in tensors and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import tmem

from .config import LANES, LOADERS, PRODUCT_WARP, SOFTMAX_WARPS, Config


@dataclass
class Memory(Fixed):
    """Barriers, the ring, and tensors in shared memory; ``*_at`` are addresses."""

    # mbarriers
    query: cute.Pointer  # Q is there
    scores: cute.Pointer  # one for each buffer of S'
    probabilities: cute.Pointer  # P' is there, and O' in step with it
    output: cute.Pointer  # O' is there
    ring: Ring
    flag_at: Int32  # a word by which the softmax's threads agree
    # operands
    query_at: Int32
    p_at: Int32
    ring_at: Int32
    scales_at: Int32
    sRow: (
        cute.Tensor
    )  # (32, 4): numbers of the rows of a tile, by lane and warp of the producer, where TMA gathers them
    sMask: cute.Tensor  # (4, tiles): a bit for each of a producer warp's keys, whether it counts
    # statistics of the softmax
    sShift: cute.Tensor  # (heads), what is added to a head's scores, in powers of two
    sChange: cute.Tensor  # (heads), of the shift, in this tile
    sFactor: cute.Tensor  # (heads), of O' in this tile; at the end of the result
    sWarps: cute.Tensor  # (heads * 4), maxima or sums of the four warps
    # results, which the cluster reads
    sStat: cute.Tensor  # (heads * 2), a work tile's row_max and row_sum
    sO: cute.Tensor  # (heads * D), over the ring


@cute.jit
def allocate(config: cutlass.Constexpr, warp: Int32):
    """Lay out shared memory, set up the barriers and take tensor memory; the caller meets the cluster then."""
    c: Config = config
    mma = c.mma
    memory = cutlass.memory.SmemAllocator()
    large = memory.allocate(c.scales.end, 1024).toint()
    regions = mma.shared

    def numbers(kind: Any, shape: Any) -> cute.Tensor:
        return memory.allocate_tensor(kind, cute.make_layout(shape), 16)

    # How many there are, and how many arrivals complete a phase.
    counts = {"query": (1, SOFTMAX_WARPS), "scores": (2, 1), "probabilities": (1, SOFTMAX_WARPS), "output": (1, 1)}
    single = {name: memory.allocate_array(cutlass.Int64, stages) for name, (stages, _) in counts.items()}
    ring = Ring(*(memory.allocate_array(cutlass.Int64, mma.stages) for _ in range(2)), mma.stages)
    flag_at, base = memory.allocate(16, 16).toint(), memory.allocate(4, 4)
    if warp == 0:
        with cute.arch.elect_one():
            for name, (stages, arrivals) in counts.items():
                for i in range(stages):
                    cute.arch.mbarrier_init(single[name] + i, arrivals)
            for i in range(mma.stages):
                cute.arch.mbarrier_init(ring.full + i, LOADERS)
                cute.arch.mbarrier_init(ring.empty + i, c.sides)
    if warp == PRODUCT_WARP:
        cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
    rows = cute.make_ptr(Float32, regions.results.at(large), cute.AddressSpace.smem, assumed_align=16)
    return Memory(
        **single,
        ring=ring,
        flag_at=flag_at,
        query_at=regions.query.at(large),
        p_at=regions.probabilities.at(large),
        ring_at=regions.ring.at(large),
        scales_at=c.scales.at(large),
        sRow=numbers(Int32, (LANES if c.grouped else 1, LOADERS)),
        sMask=numbers(Int32, (LOADERS, c.masks)),
        sShift=numbers(Float32, c.heads),
        sChange=numbers(Float32, c.heads),
        sFactor=numbers(Float32, c.heads),
        sWarps=numbers(Float32, c.heads * 4),
        sStat=numbers(Float32, c.heads * 2),
        sO=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim)),
    )
