"""A radix-select pass: histogram of a row's keys in shared memory, and the bin that holds the key of a rank.

A CTA counts 2048 bins (11 bits) in its own shared memory, in groups of 64. Group sums say which group holds the bin,
its counters which bin, so one warp searches both. CTAs of a cluster push their group sums, then the counters of that
one group, into each other's shared memory by ``st.async``: 3 KB into each CTA instead of 64, counted by transaction
mbarriers (one arrival, and the bytes of all CTAs). No cluster barrier is needed, before which Hopper waits for all that
a CTA has written and read (``MEMBAR.ALL.GPU``), and no CTA exits before all that is meant for it has arrived.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from torch_attnkit.cuda import copies, counters, warp_scan
from torch_attnkit.cuda.ring import Fixed

from .plan import Config

BITS = 11  # of a key, that one pass decides
_BINS = 1 << BITS
_GROUP = 64  # bins: two a lane
_GROUPS = _BINS // _GROUP  # one a lane
_DISCARD = _BINS  # the counter of keys outside of the interval
_COUNTERS = _BINS + 4  # of a pass, a multiple of 16 bytes
# The result of a pass, in shared memory.
_BIN, _BEFORE, _COUNT, _RESULTS = 0, 1, 2, 4


def lanes_below(upto: Int32, need: Int32) -> Int32:
    """In how many lanes a running sum is less than ``need``: the first lane where it is not."""
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(upto < need)))


def _pair(pointer: cute.Pointer) -> cute.Tensor:
    """Two neighbouring counters, of which the first is an even one."""
    aligned = cute.make_ptr(Int32, pointer.toint(), cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(aligned, cute.make_layout(2))


class Histogram(Fixed):
    """The counters of ``passes`` passes: ``setup``, ``clear``, a barrier; then for each pass ``count`` and ``find``."""

    def __init__(self, config: Config, passes: int):
        self.c, self.passes = config, passes

    @cute.jit
    def setup(self, allocator: Any):
        """Shared memory and, in a cluster, the barriers. Call first, so that the cluster's start overlaps the loads."""
        blocks, passes = self.c.cluster, self.passes
        shapes = (
            (_COUNTERS, passes),
            (_RESULTS, passes),
            (_GROUPS, blocks, passes),
            (_GROUP, blocks, passes),
            (2, blocks),
        )
        self.sCounts, self.sResult, self.sGroups, self.sBins, self.sTotals = (
            allocator.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16) for shape in shapes
        )
        if const_expr(blocks > 1):
            self.barriers = allocator.allocate_array(cutlass.Int64, 2 * passes + 1)
            if cute.arch.thread_idx()[0] == 0:
                for i in cutlass.range_constexpr(2 * passes + 1):
                    cute.arch.mbarrier_init(self.barriers + i, 1)
                cute.arch.mbarrier_init_fence()
                for i in cutlass.range_constexpr(2 * passes + 1):
                    words = const_expr(2 if i == 2 * passes else (_GROUPS, _GROUP)[i % 2])
                    cute.arch.mbarrier_arrive_and_expect_tx(self.barriers + i, 4 * words * blocks)
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def clear(self):
        """Counters are zero after the next barrier."""
        thread, _, _ = cute.arch.thread_idx()
        first = self.sCounts.iterator.toint()
        for i in cutlass.range(thread, _COUNTERS * self.passes // 4, self.c.threads, unroll=1):
            copies.store_words(first + 16 * i, [Int32(0)] * 4, cute.AddressSpace.smem)

    def count(self, p: int, bin: Uint32) -> None:
        """Count a key; one whose ``bin`` is none of the pass's goes to the discard counter."""
        at = bin if p == 0 else cutlass.min(bin, Uint32(_DISCARD))
        counters.count(self.sCounts[None, p].iterator.toint() + Int32(at) * 4)

    @cute.jit
    def find(self, p: int, need: Int32, rank: Int32):
        """The bin with the ``need``-th key, how many keys are below it and in it; in every thread."""
        cute.arch.barrier()  # the CTA's keys are counted
        self.sum_groups(p, rank)
        if const_expr(self.c.cluster == 1):
            cute.arch.barrier()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        if warp < self.c.cluster:
            group, before = self.find_group(p, need)
            if const_expr(self.c.cluster > 1):
                sPair = self.pair(p, group)
                to = self.sBins.iterator + ((p * self.c.cluster + rank) * _GROUP + 2 * lane)
                cute.arch.store_async_dsmem(_pair(to).iterator, (sPair[0], sPair[1]), self.barriers + (2 * p + 1), warp)
            if warp == 0:
                self.find_bin(p, need, group, before)
        cute.arch.barrier()
        return self.sResult[_BIN, p], self.sResult[_BEFORE, p], self.sResult[_COUNT, p]

    @cute.jit
    def sum_groups(self, p: int, rank: Int32):
        """This CTA's sum of each group, to all CTAs of the row."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        each = const_expr(_GROUPS // self.c.warps)  # groups of a warp
        for i in cutlass.range_constexpr(each):
            group = warp * each + i
            sPair = _pair(self.sCounts.iterator + (p * _COUNTERS + group * _GROUP + 2 * lane))
            total = cute.arch.warp_redux_sync(sPair[0] + sPair[1], "add")
            if const_expr(self.c.cluster > 1):
                if lane < self.c.cluster:
                    to = self.sGroups.iterator + ((p * self.c.cluster + rank) * _GROUPS + group)
                    cute.arch.store_async_dsmem(to, total, self.barriers + 2 * p, lane)
            elif lane == 0:
                self.sGroups[group, 0, p] = total

    @cute.jit
    def find_group(self, p: int, need: Int32):
        """The group with the ``need``-th key, and how many keys are below it."""
        if const_expr(self.c.cluster > 1):
            cute.arch.mbarrier_wait(self.barriers + 2 * p, 0)
        lane, total = cute.arch.lane_idx(), Int32(0)
        for block in cutlass.range_constexpr(self.c.cluster):
            total += self.sGroups[self.counter_of(lane, _GROUPS, p), block, p]
        upto = warp_scan.up_to_lane(total)
        group = lanes_below(upto, need)
        return group, cute.arch.shuffle_sync(upto - total, group)

    def counter_of(self, at: Int32, count: int, p: int) -> Int32:
        """Which counter has group or bin ``at`` of ``count``: the first pass counts by scores' leading bits, of which
        those of positive scores ascend where keys descend."""
        return at ^ cutlass.select_(at < count // 2, Int32(count // 2 - 1), Int32(0)) if p == 0 else at

    @cute.jit
    def pair(self, p: int, group: Int32) -> cute.Pointer:
        """Where this lane's two bins of a group are counted, the even one first."""
        first = self.counter_of(group * _GROUP + 2 * cute.arch.lane_idx(), _BINS, p) & -2
        return _pair(self.sCounts.iterator + (p * _COUNTERS + first))

    @cute.jit
    def find_bin(self, p: int, need: Int32, group: Int32, before: Int32):
        """Write what ``find`` returns; ``before``: how many keys are below the group."""
        if const_expr(self.c.cluster > 1):
            cute.arch.mbarrier_wait(self.barriers + (2 * p + 1), 0)
        lane = cute.arch.lane_idx()
        low, high = Int32(0), Int32(0)
        for block in cutlass.range_constexpr(self.c.cluster):
            if const_expr(self.c.cluster > 1):
                sPair = _pair(self.sBins.iterator + ((p * self.c.cluster + block) * _GROUP + 2 * lane))
            else:
                sPair = self.pair(p, group)
            low += sPair[0]
            high += sPair[1]
        if const_expr(p == 0):
            reversed_ = group < _GROUPS // 2
            low, high = cutlass.select_(reversed_, high, low), cutlass.select_(reversed_, low, high)
        upto = before + warp_scan.up_to_lane(low + high)
        if lane == lanes_below(upto, need):
            below = upto - high  # the second bin
            second = below < need
            self.sResult[_BIN, p] = group * _GROUP + 2 * lane + cutlass.select_(second, Int32(1), Int32(0))
            self.sResult[_BEFORE, p] = cutlass.select_(second, below, below - low)
            self.sResult[_COUNT, p] = cutlass.select_(second, high, low)

    @cute.jit
    def totals(self, own: Any, rank: Int32):
        """Sums of each CTA's two counts: over the CTAs before this one, and over all of the cluster."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        barrier = self.barriers + 2 * self.passes
        if warp == 0:
            if lane < self.c.cluster:
                to = _pair(self.sTotals.iterator + 2 * rank).iterator
                cute.arch.store_async_dsmem(to, (own[0], own[1]), barrier, lane)
        cute.arch.mbarrier_wait(barrier, 0)
        block = cutlass.min(lane, Int32(self.c.cluster - 1))
        before, whole = [], []
        for i in cutlass.range_constexpr(2):
            given = self.sTotals[i, block]
            before.append(cute.arch.warp_redux_sync(cutlass.select_(lane < rank, given, Int32(0)), "add"))
            whole.append(cute.arch.warp_redux_sync(cutlass.select_(lane < self.c.cluster, given, Int32(0)), "add"))
        return *before, *whole
