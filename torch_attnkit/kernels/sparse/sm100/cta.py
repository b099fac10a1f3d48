"""A CTA's coordinates, and its shared memory and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import tmem

from ..arguments import Scalars, Tensors
from .config import KEYS, LANES, LOADERS, MMA_WARP, SOFTMAX_WARPS, Config


class CtaCoord(NamedTuple):
    """A cluster has ``splits`` shares of a work tile's keys, each on all sides; CTAs of a share are neighbours."""

    work: Int32  # the number of the work tile
    token: Int32
    head: Int32  # of the CTA's heads the first
    heads: Int32  # of them
    side: Any
    split: Int32  # which share of the cluster's
    splits: Int32
    group: Int32  # which cluster of the work tile
    row: Int32  # the first of the CTA's heads that it combines
    rows: Int32  # of them

    @property
    def part(self) -> Int32:
        """Index of the share among all of the work tile."""
        return self.group * self.splits + self.split


def cta_coord(config: Config, tensors: Tensors, scalars: Scalars) -> CtaCoord:
    """Work tiles of a token are neighbours, so that its keys are read from device memory once."""
    c = config
    rank, cluster = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.block_idx()[0]) // (scalars.ctas * c.sides)
    side, split = (rank % c.sides, rank // c.sides) if const_expr(c.sides > 1) else (0, rank)
    work, group = Int32(cluster // Uint32(scalars.groups)), Int32(cluster % Uint32(scalars.groups))
    blocks = Uint32(scalars.head_blocks)
    token, block = Int32(Uint32(work) // blocks), Int32(Uint32(work) % blocks)
    head = (block * c.sides + side) * c.heads
    heads = cutlass.max(cutlass.min(Int32(tensors.q.shape[1]) - head, c.heads), 0)
    row = heads * split // scalars.ctas
    rows = heads * (split + 1) // scalars.ctas - row
    return CtaCoord(work, token, head, heads, side, split, scalars.ctas, group, row, rows)


def own_warp() -> Int32:
    """Index among the producer warps."""
    return cute.arch.warp_idx() % LOADERS


def own_row() -> Int32:
    """Row of a tile that this producer lane looks up."""
    lane, each = cute.arch.lane_idx(), LANES // 2
    return lane // each * (KEYS // 2) + own_warp() * each + lane % each


@dataclass
class Memory(Fixed):
    """Barriers, the K/V ring and shared-memory tensors; ``*_at`` are addresses."""

    # mbarriers
    query: cute.Pointer  # Q is in shared memory
    scores: cute.Pointer  # one for each buffer of S'
    probabilities: cute.Pointer  # P' is stored, and O' rescaled
    output: cute.Pointer  # O' += V' P' is done
    ring: Ring
    flag_at: Int32  # a word by which the softmax's threads agree
    # operands
    query_at: Int32
    p_at: Int32
    ring_at: Int32
    scales_at: Int32
    sRow: cute.Tensor  # (32, 4): row indices of a tile for gather4, by producer lane and warp
    sMask: cute.Tensor  # (4, tiles): a bit for each of a producer warp's keys, whether it counts
    # statistics of the softmax
    sShift: cute.Tensor  # (heads), what is added to a head's scores, in powers of two
    sChange: cute.Tensor  # (heads), of the shift, in this tile
    sFactor: cute.Tensor  # (heads), that rescale O' in this tile; at the end those of the result
    sWarps: cute.Tensor  # (heads * 4), maxima or sums of the four warps
    # results, which the cluster reads
    sStat: cute.Tensor  # (heads * 2), a work tile's row_max and row_sum
    sO: cute.Tensor  # (heads * D), over the ring


@cute.jit
def allocate(config: cutlass.Constexpr, warp: Int32):
    """Allocate shared and tensor memory and initialise barriers; a cluster barrier must follow."""
    c: Config = config
    mma = c.mma
    memory = cutlass.memory.SmemAllocator()
    large = memory.allocate(c.scales.end, 1024).toint()
    regions = mma.shared

    def scalars(kind: Any, shape: Any) -> cute.Tensor:
        return memory.allocate_tensor(kind, cute.make_layout(shape), 16)

    # (stages, arrivals per phase).
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
    if warp == MMA_WARP:
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
        sRow=scalars(Int32, (LANES if c.gather4 else 1, LOADERS)),
        sMask=scalars(Int32, (LOADERS, c.masks)),
        sShift=scalars(Float32, c.heads),
        sChange=scalars(Float32, c.heads),
        sFactor=scalars(Float32, c.heads),
        sWarps=scalars(Float32, c.heads * 4),
        sStat=scalars(Float32, c.heads * 2),
        sO=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim)),
    )
