"""What a CTA of the kernel has in shared memory, in tensors and barriers. Imports cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.kernels.decode.sm100.config import KEYS, Tcgen05Config
from torch_attnkit.kernels.decode.sm100.roles import Products

from .config import LOADERS, PRODUCT_WARP, SOFTMAX_WARPS, Config


class Layouts(NamedTuple):
    """Of shared memory, stages last. K and V are the same bytes."""

    q: cute.ComposedLayout  # ((N, 16), 1, part / 16, parts)
    k: cute.ComposedLayout  # ((128, 16), 1, part / 16, stages)
    v: cute.ComposedLayout  # ((part, 16), 1, 128 / 16, stages)
    p: cute.ComposedLayout  # ((N, 16), 1, 128 / 16, 1)


def products_of(c: Tcgen05Config) -> tuple[Products, Layouts]:
    """S' = K Q' and O' += V' P', and their operands in shared memory."""
    K, MN, one = OperandMajorMode.K, OperandMajorMode.MN, tcgen05.CtaGroup.ONE
    tiler_qk, tiler_pv = (KEYS, c.heads, c.part), (c.part, c.heads, KEYS)
    qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, one, tiler_qk[:2])
    pv = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, MN, MN, Float32, one, tiler_pv[:2])
    layouts = Layouts(
        blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.parts),
        blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.stages),
        blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, c.stages),
        blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, 1),
    )
    return Products(qk, pv), layouts


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
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sP: cute.Tensor
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
def allocate(config: cutlass.Constexpr, layouts: Layouts, warp: Int32):
    """Lay out shared memory, set up the barriers and take tensor memory; the caller meets the cluster then."""
    c: Config = config
    mma = c.mma
    memory = cutlass.memory.SmemAllocator()
    large = memory.allocate(c.scales.end, 1024).toint()
    regions = mma.shared
    query_at, p_at, ring_at = (r.at(large) for r in (regions.query, regions.probabilities, regions.ring))

    def staged(at: Int32, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.make_ptr(c.dtype, at, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

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
        query_at=query_at,
        p_at=p_at,
        ring_at=ring_at,
        scales_at=c.scales.at(large),
        sQ=staged(query_at, layouts.q),
        sK=staged(ring_at, layouts.k),
        sV=staged(ring_at, layouts.v),
        sP=staged(p_at, layouts.p),
        sMask=numbers(Int32, (LOADERS, c.masks)),
        sShift=numbers(Float32, c.heads),
        sChange=numbers(Float32, c.heads),
        sFactor=numbers(Float32, c.heads),
        sWarps=numbers(Float32, c.heads * 4),
        sStat=numbers(Float32, c.heads * 2),
        sO=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim)),
    )
