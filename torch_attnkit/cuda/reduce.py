"""Reductions over the threads that share a row: shuffles, then shared memory, then the cluster's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .warp_ops import thread_index


class RowSum:
    """Row reduction: sums one value of each of the ``lanes`` threads (times ``cluster`` CTAs) of a row.

    ``lanes`` is a power of two and divides ``threads``, or equals it. Warp shuffles, then shared memory; in a cluster
    each CTA stores its partial sums into its peers' shared memory, and an mbarrier counts the bytes: one round trip,
    and no CTA exits before its incoming sums have arrived. One sum for each object.
    """

    def __init__(self, threads: int, lanes: int, cluster: int = 1):
        self.lanes, self.cluster = lanes, cluster
        self.warps = max(1, lanes // 32)  # of one row
        self.rows = threads // 32 // self.warps
        self.shared = self.warps > 1 or cluster > 1

    @cute.jit
    def setup(self):
        """Shared memory and, in a cluster, the barrier. Call first, so that the cluster's start overlaps the loads."""
        if const_expr(self.shared):
            smem = cutlass.memory.SmemAllocator()
            shape = (self.warps, self.cluster, self.rows)  # of one row, of its cluster, of this block
            self.sPartial = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        if const_expr(self.cluster > 1):
            self.barrier = smem.allocate_array(cutlass.Int64, 1)
            barrier, bytes_in = self.barrier, cute.size(self.sPartial) * 4
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, bytes_in)
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def __call__(self, value: Float32, rank: Any = 0):
        """The sum, in every thread of the row. ``rank`` is the block's number in its cluster."""
        group = const_expr(min(self.lanes, 32))
        value = cute.arch.warp_reduction(value, operator.add, threads_in_group=group)
        if const_expr(self.shared):
            value = self._across_warps(value, rank)
        return value

    @cute.jit
    def _across_warps(self, value: Float32, rank: Any):
        warps, cluster, sPartial = self.warps, self.cluster, self.sPartial
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row, part = warp // warps, warp % warps
        if const_expr(cluster > 1):
            barrier = self.barrier
            cute.arch.cluster_wait()  # the other blocks' barriers stand
            if lane < cluster:
                slot = sPartial.iterator + cute.crd2idx((part, rank, row), sPartial.layout)
                cute.arch.store_async_dsmem(slot, value.bitcast(Int32), barrier, lane)
            cute.arch.mbarrier_wait(barrier, 0)
        else:
            if lane == 0:
                sPartial[part, 0, row] = value
            cute.arch.barrier()
        total = Float32(0)
        for step in cutlass.range_constexpr(0, warps * cluster, 32):
            at = lane + step
            if at < warps * cluster:
                total += sPartial[at % warps, at // warps, row]
        return cute.arch.warp_reduction(total, operator.add)


def transpose_reduce(values: list[Float32], join: Callable[[Float32, Float32], Float32]) -> list[Float32]:
    """Warp transpose-reduce: joins every value over the lanes; of n results lane l has those from l * n // 32 on.

    Lanes exchange halves of what they have, so that 32 values take 31 shuffles, not 160.
    """
    lane = thread_index() & 31
    for offset in (16, 8, 4, 2, 1):
        if len(values) > 1:
            half, upper = len(values) // 2, (lane & offset) != 0
            pairs = list(zip(values[:half], values[half:], strict=True))
            sent = [cutlass.select_(upper, low, high) for low, high in pairs]
            values = [cutlass.select_(upper, high, low) for low, high in pairs]
        else:
            sent = values
        values = [join(v, cute.arch.shuffle_sync_bfly(s, offset)) for v, s in zip(values, sent, strict=True)]
    return values
