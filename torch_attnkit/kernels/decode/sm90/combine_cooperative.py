"""Cooperative in-kernel combine of splits, for CTAs that all run at once: those that brought a group's splits share it.

    a work tile     results from registers: a whole group's to the output; a split's to the workspace, in the order in
                    which lanes have them; then one thread counts the CTA's arrival (acq_rel add)
    the CTA's end   one thread waits until all splits of the group have arrived -> the CTA combines its share of it

No second kernel, and no CTA reduces while others idle. A CTA waits only after its own splits are out, so none waits
for a CTA that waits. Where CTAs do not all run at once, one that has looked ``_PATIENCE`` times gives up by a CAS on
the counter, and the last to arrive combines everything. Splits are added in a fixed order, so the result has the same
bits. The last CTA past the wait resets both counters.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import atomics, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.sm90 import wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROWS
from torch_attnkit.cuda.smem import itemsize
from torch_attnkit.cuda.stream_k import Partition
from torch_attnkit.cuda.warp_ops import exp2

from ...scores import LOG2_E
from ..arguments import Scalars, Tensors, out_dtype
from ..schedule import WorkTile
from .config import COUNTERS, MlaConfig

_TIMED_OUT = 1 << 16  # added to the first counter by a CTA whose wait has timed out
_PATIENCE = 1 << 12  # polls of it before the timeout, each a round trip to L2: milliseconds in all
_NONE, _ALL = -1, -2  # shares of a group
_LANES = 8  # that a row has while splits are weighed
_IN_FLIGHT = 8  # splits whose sums a lane has in flight
_VECTOR = 16  # bytes: four floats as a lane has them, two neighbours of a row, and of the row 8 below it
_INF = float("inf")
_LN_2 = 1 / LOG2_E


class Pending(IntEnum):
    """The words of shared memory by which a CTA knows a group to which it has brought a split."""

    BLOCKS = 0  # CTAs that bring one; 0: there is no such group
    ARRIVED = 1  # CTAs before this one, and who gave up
    FIRST = 2  # CTA of them
    ODD = 3  # whether that one's split is in its odd slot, behind an earlier work tile's
    B = 4
    HEAD = 5
    HEADS = 6
    SHARE = 7  # that this CTA combines: one of as many as CTAs, or ``_ALL`` or ``_NONE``


class CooperativeCombine:
    """The epilogue of ``mla.py``, whose value warpgroups have half of the columns each, for 64 heads."""

    def __init__(self, config: MlaConfig):
        self.c = config

    def init(self, shared: Int32) -> None:
        """Before a CTA's first work tile: no group is pending."""
        for which in range(2):
            self._no_group(self._pending(shared, which))

    @cute.jit
    def _no_group(self, sPending: cute.Tensor):
        if cute.arch.thread_idx()[0] == 0:
            sPending[Pending.BLOCKS] = Int32(0)

    @cute.jit
    def store_columns(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, rO: cute.Tensor, sSums: cute.Tensor, thread: Int32,
        half: Int32,
    ):  # fmt: skip
        """A value warpgroup's half of O, by the warps that have heads."""
        row, parts = wgmma.first_row(thread), const_expr(cute.size(rO) // 4)
        if thread // 32 * 16 < tile.heads:
            if tile.slot < 0:
                scales = [
                    self._factor(tensors, scalars, tile, row + 8 * r, sSums[row + 8 * r, 0], sSums[row + 8 * r, 1])
                    for r in range(2)
                ]
                for j in cutlass.range_constexpr(parts):
                    values = [rO[4 * j + x] * scales[x // 2] for x in range(4)]
                    self._store(tensors, tile, row, (half * parts + j) * 8 + (thread & 3) * 2, values)
            else:
                lanes = _lanes(tile.heads)
                at = self._split(tensors, tile.slot) + (half * parts * lanes + thread) * _VECTOR
                for j in cutlass.range_constexpr(parts):
                    op.store_4_floats(at + j * (lanes * _VECTOR), [rO[4 * j + x] for x in range(4)])

    @cute.jit
    def store_stats(
        self, tensors: Tensors, tile: WorkTile, rMax: cute.Tensor, rSum: cute.Tensor, thread: Int32
    ):  # fmt: skip
        """A score warpgroup's maxima and sums, which its four lanes of a row all have."""
        row = wgmma.first_row(thread)
        if (thread & 3) == 0:
            for r in cutlass.range_constexpr(2):
                if tile.slot < 0:
                    self._store_lse(tensors, tile, row + 8 * r, rMax[r], rSum[r])
                else:
                    at = self._split(tensors, tile.slot) + self.c.split.stat_at(row + 8 * r)
                    memory_ops.store_2_floats(at, [rMax[r], rSum[r]])

    def finish(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, whole: Boolean, slot: Int32
    ) -> None:
        """The warpgroups have stored everything."""

    @cute.jit
    def arrive(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: WorkTile, shared: Int32, start: Int32,
        tiles: Int32,
    ):  # fmt: skip
        """Count this CTA's arrival, whose split of the group with units [start, start + tiles) is in the workspace."""
        first_block, last_block = cut.owner(start), cut.owner(start + tiles - 1)
        here = cute.arch.block_idx()[0]
        block = first_block * scalars.concurrent + here % scalars.concurrent
        odd = cutlass.select_(cut.start(first_block) == start, Int32(0), Int32(1))
        # Of two splits of a CTA the second begins its group.
        sPending = self._pending(shared, cutlass.select_(here == block, odd, Int32(0)))
        # A barrier orders the CTA's stores before this add's release.
        if cute.arch.thread_idx()[0] == 0:
            sPending[Pending.BLOCKS] = last_block - first_block + 1
            sPending[Pending.ARRIVED] = op.add_acq_rel(self._counters(tensors, block), Int32(1))
            sPending[Pending.FIRST] = block
            sPending[Pending.ODD] = odd
            sPending[Pending.B] = tile.b
            sPending[Pending.HEAD] = tile.head
            sPending[Pending.HEADS] = tile.heads

    @cute.jit
    def combine(self, tensors: Tensors, scalars: Scalars, shared: Int32):
        """The CTA's shares of the groups to which it brought splits, behind a barrier of all threads."""
        for which in cutlass.range(2, unroll=1):
            sPending = self._pending(shared, which)
            if sPending[Pending.BLOCKS] > 0:
                counters, left = self._counters(tensors, sPending[Pending.FIRST]), Int32(0)
                if cute.arch.thread_idx()[0] == 0:
                    sPending[Pending.SHARE] = self._wait(counters, sPending)
                cute.arch.barrier()
                if cute.arch.thread_idx()[0] == 0:
                    left = atomics.add_relaxed(counters + 4, Int32(1))
                self._combine_share(tensors, scalars, shared, sPending)
                if cute.arch.thread_idx()[0] == 0:
                    if left == sPending[Pending.BLOCKS] - 1:  # nobody polls any more
                        for i in cutlass.range_constexpr(COUNTERS):
                            atomics.store_relaxed(counters + 4 * i, Int32(0))

    def _pending(self, shared: Int32, which: Int32 | int) -> cute.Tensor:
        at = self.c.shared.pending.at(shared) + which * (4 * len(Pending))
        words = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(words, cute.make_layout(len(Pending)))

    def _counters(self, tensors: Tensors, block: Int32) -> Int64:
        return tensors.count.iterator.toint() + Int64(block) * (4 * COUNTERS)

    def _split(self, tensors: Tensors, slot: Int32) -> Int64:
        return tensors.splits.iterator.toint() + Int64(slot) * self.c.split.nbytes

    @cute.jit
    def _wait(self, counters: Int64, sPending: cute.Tensor):
        """One thread: until all of a group's splits have arrived; returns which share is this CTA's."""
        blocks, arrived = sPending[Pending.BLOCKS], sPending[Pending.ARRIVED]
        share, seen, polls = arrived % _TIMED_OUT, arrived + 1, Int32(0)
        if share == blocks - 1:
            if arrived >= _TIMED_OUT:
                share = Int32(_ALL)
        else:
            while (seen % _TIMED_OUT < blocks) & (share != _NONE):
                seen = memory_ops.load_acquire(counters)
                polls += 1
                if (polls >= _PATIENCE) & (seen % _TIMED_OUT < blocks):
                    # The last to arrive sees it, unless all have arrived meanwhile.
                    if atomics.swap_if(counters, seen, seen + _TIMED_OUT) == seen:
                        share = Int32(_NONE)
            if seen >= _TIMED_OUT:
                share = Int32(_NONE)
        return share

    @cute.jit
    def _combine_share(self, tensors: Tensors, scalars: Scalars, shared: Int32, sPending: cute.Tensor):
        """A share of a group from the splits in the workspace to the result: all of it is on its way to shared memory,
        which is free by now, while the splits' weights are computed."""
        c = self.c
        share, blocks, heads = sPending[Pending.SHARE], sPending[Pending.BLOCKS], sPending[Pending.HEADS]
        block, odd = sPending[Pending.FIRST], sPending[Pending.ODD]
        tile = WorkTile(sPending[Pending.B], Int32(0), sPending[Pending.HEAD], heads, *[Int32(0)] * 3)
        lanes = _lanes(heads)
        count = const_expr(c.dim_v // 8) * lanes
        chunk = (count + blocks - 1) // blocks
        begin, end = share * chunk, cutlass.min(share * chunk + chunk, count)
        if share < 0:
            begin, end = Int32(0), cutlass.select_(share == _ALL, count, Int32(0))
        thread = cute.arch.thread_idx()[0]
        weights = shared + chunk * blocks * _VECTOR
        sWeights = self._floats(weights, (ROWS, blocks))
        for first in cutlass.range(begin, end, chunk, unroll=1):
            many = cutlass.min(chunk, end - first)
            stats = self._stats(tensors, scalars, sPending, Int32(0))  # ahead of the many loads of O
            split, vector = thread // many, thread % many
            down, right = c.threads // many, c.threads % many
            while split < blocks:
                slot = (block + split * scalars.concurrent) * 2 + cutlass.select_(split == 0, odd, Int32(0))
                source = self._split(tensors, slot) + (first + vector) * _VECTOR
                op.copy_16_async(shared + (split * many + vector) * _VECTOR, source, Int32(_VECTOR))
                split, vector = split + down, vector + right
                if vector >= many:
                    split, vector = split + 1, vector - many
            cute.arch.cp_async_commit_group()
            self._weights(tensors, scalars, tile, sPending, sWeights, stats, first == 0)
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            for index in cutlass.range(thread, many, c.threads, unroll=1):
                lane, column = (first + index) % lanes, (first + index) // lanes
                row = wgmma.first_row(lane)
                sums = [Float32(0.0)] * 4
                for n in cutlass.range(blocks, unroll=4):
                    part = self._floats(shared + (n * many + index) * _VECTOR, 4)
                    both = [sWeights[row + 8 * r, n] for r in range(2)]
                    sums = [sums[x] + both[x // 2] * part[x] for x in range(4)]
                self._store(tensors, tile, row, column * 8 + (lane & 3) * 2, sums)
            cute.arch.barrier()

    def _floats(self, address: Int32, shape: Any) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(shape))

    def _stats(self, tensors: Tensors, scalars: Scalars, sPending: cute.Tensor, first: Int32) -> list:
        """Maxima and sums of a lane's row in its splits from ``first`` on; beyond the last they repeat it."""
        block, odd, splits = sPending[Pending.FIRST], sPending[Pending.ODD], sPending[Pending.BLOCKS]
        row, lane = cute.arch.thread_idx()[0] // _LANES, cute.arch.thread_idx()[0] % _LANES
        stats = []
        for i in range(_IN_FLIGHT):
            n = cutlass.min(first + lane + _LANES * i, splits - 1)
            slot = (block + n * scalars.concurrent) * 2 + cutlass.select_(n == 0, odd, Int32(0))
            stats.append(op.load_2_floats(self._split(tensors, slot) + self.c.split.stat_at(row)))
        return stats

    @cute.jit
    def _accumulate(
        self, sums: cute.Tensor, sWeights: cute.Tensor, splits: Int32, row: Int32, first: Int32, stats: list
    ):  # fmt: skip
        """More splits into a lane's maximum and sum; their maxima go where the weights will be."""
        old, maxima = sums[0], []
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            valid = first + _LANES * i < splits
            maxima.append(cutlass.select_(valid, stats[i][0], Float32(-_INF)))
            sums[0] = cute.arch.fmax(sums[0], maxima[i])
            if valid:
                sWeights[row, first + _LANES * i] = maxima[i]
        safe = finite(sums[0])
        sums[1] = sums[1] * exp2(old - safe)
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            some = exp2(maxima[i] - safe) * stats[i][1]
            sums[1] = sums[1] + cutlass.select_(maxima[i] == -Float32.inf, Float32(0.0), some)

    @cute.jit
    def _weights(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, sPending: cute.Tensor, sWeights: cute.Tensor,
        stats: list, with_lse: Boolean,
    ):  # fmt: skip
        """The weight of each split in the result, by eight lanes a row; ``stats`` are those of the first splits."""
        splits = sPending[Pending.BLOCKS]
        row, lane = cute.arch.thread_idx()[0] // _LANES, cute.arch.thread_idx()[0] % _LANES
        sums = cute.make_rmem_tensor(2, Float32)
        sums[0], sums[1] = Float32(-_INF), Float32(0.0)
        self._accumulate(sums, sWeights, splits, row, lane, stats)
        for first in cutlass.range(_LANES * _IN_FLIGHT, splits, _LANES * _IN_FLIGHT, unroll=1):
            more = self._stats(tensors, scalars, sPending, first)
            self._accumulate(sums, sWeights, splits, row, first + lane, more)
        row_max, row_sum = sums[0], sums[1]
        for distance in (1, 2, 4):
            other = cute.arch.shuffle_sync_bfly(row_max, distance)
            more = cute.arch.shuffle_sync_bfly(row_sum, distance)
            most = cute.arch.fmax(row_max, other)
            own, peer = row_sum * exp2(row_max - finite(most)), more * exp2(other - finite(most))
            row_max, row_sum = most, own + peer  # the same bits in both lanes
        factor = self._factor(tensors, scalars, tile, row, row_max, row_sum)
        for n in cutlass.range(lane, splits, _LANES, unroll=1):
            sWeights[row, n] = exp2(sWeights[row, n] - finite(row_max)) * factor
        if with_lse & (lane == 0):
            self._store_lse(tensors, tile, row, row_max, row_sum)

    @cute.jit
    def _factor(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, row: Int32, row_max: Float32, row_sum: Float32
    ):
        """1 / row_sum, the sink included: normalises a row of O."""
        denominator = row_sum
        if (scalars.has_sink != 0) & (row < tile.heads):
            denominator += exp2(tensors.sink[tile.head + row] * LOG2_E - finite(row_max))
        return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))

    @cute.jit
    def _store(self, tensors: Tensors, tile: WorkTile, row: Int32, column: Int32, values: list[Float32]):
        """Two columns of a row and of the one 8 below it, as far as there are heads."""
        dtype = out_dtype(self.c.dtype)
        size = const_expr(itemsize(dtype))
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < tile.heads:
                h = tile.head + row + 8 * r
                out = Int64(tensors.out.stride[0]) * tile.b + tensors.out.stride[1] * h + column
                word = op.pack(dtype, values[2 * r], values[2 * r + 1])
                atomics.store_word(tensors.out.iterator.toint() + out * size, word)

    @cute.jit
    def _store_lse(self, tensors: Tensors, tile: WorkTile, row: Int32, row_max: Float32, row_sum: Float32):
        if row < tile.heads:
            tensors.lse[tile.b, tile.head + row] = (row_max + op.log2(row_sum)) * _LN_2


def _lanes(heads: Int32) -> Int32:
    """Of a warpgroup, those of warps that have heads."""
    return (heads + 15) // 16 * 32
