"""Work tiles of a grouped GEMM: slots sorted by expert, each expert's tokens cut into tiles; a static scheduler.

A counting sort: histogram of experts, prefix sum, scatter. One CTA does it, or all CTAs together where slots are many,
or a warp of every CTA where they are few. The order of an expert's slots is left to atomics unless a warp sorts: no
result depends on it, since a token's sums do not depend on what else is in its tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed

from .arguments import Tensors, chosen
from .problem import WARP_SLOTS

_IN_FLIGHT = 8  # slots whose choices a thread has on their way


class Sort:
    """``columns``: tokens of a work tile; ``experts``: at least as many as there are."""

    def __init__(self, columns: int, experts: int, threads: int):
        self.columns, self.experts, self.threads = columns, experts, threads

    @cute.jit
    def run(self, tensors: Tensors, memory: Any):
        """All threads of one CTA."""
        sCount = memory.allocate_tensor(Int32, cute.make_layout(self.experts), 16)
        sSum = memory.allocate_tensor(Int32, cute.make_layout((self.threads // 32, 2)), 16)
        thread = cute.arch.thread_idx()[0]
        experts, top_k = Int32(tensors.up.packed.shape[0]), Int32(tensors.indices.shape[1])
        slots = Int32(tensors.indices.shape[0]) * top_k
        for e in cutlass.range(thread, experts, self.threads, unroll=1):
            sCount[e] = Int32(0)
        cute.arch.barrier()
        for first in cutlass.range(thread, slots, self.threads * _IN_FLIGHT, unroll=1):
            for e in self._choices(tensors, first, slots, top_k):
                if e >= 0:
                    cute.arch.atomic_add(sCount.iterator + e, Int32(1), sem="relaxed", scope="cta")
        cute.arch.barrier()
        self.tiles(tensors, sCount, sSum, thread, experts, cutlass.Boolean(True))
        cute.arch.barrier()
        for first in cutlass.range(thread, slots, self.threads * _IN_FLIGHT, unroll=1):
            for i, e in enumerate(self._choices(tensors, first, slots, top_k)):
                dest = Int32(-1)
                if e >= 0:
                    dest = cute.arch.atomic_add(sCount.iterator + e, Int32(1), sem="relaxed", scope="cta")
                if dest >= 0:
                    tensors.order[dest] = first + i * self.threads

    def _choices(self, tensors: Tensors, first: Int32, slots: Int32, top_k: Int32) -> list[Int32]:
        """The experts of every ``self.threads``-th slot from ``first`` on, -1 beyond the last."""
        at = [cutlass.min(first + i * self.threads, slots - 1) for i in range(_IN_FLIGHT)]
        experts = [chosen(tensors, slot // top_k, slot % top_k) for slot in at]
        return [cutlass.select_(first + i * self.threads < slots, e, Int32(-1)) for i, e in enumerate(experts)]

    @cute.jit
    def tiles(
        self, tensors: Tensors, sCount: cute.Tensor, sSum: cute.Tensor, thread: Int32, experts: Int32,
        write: cutlass.Boolean,
    ):  # fmt: skip
        """Counts become first rows; an expert's tokens are cut into tiles of equal sizes, or nearly, which one CTA
        should ``write``; a thread has neighbouring experts."""
        each = (experts + self.threads - 1) // self.threads
        begin, end = cutlass.min(thread * each, experts), cutlass.min((thread + 1) * each, experts)
        slots, tiles = Int32(0), Int32(0)
        for e in cutlass.range(begin, end, unroll=1):
            slots += sCount[e]
            tiles += (sCount[e] + self.columns - 1) // self.columns
        first, tile = self._before(sSum, thread, slots, tiles)
        if write & (thread == self.threads - 1):
            tensors.tiles[0, 0] = tile + tiles
        for e in cutlass.range(begin, end, unroll=1):
            rest = sCount[e]
            sCount[e] = first
            left = (rest + self.columns - 1) // self.columns
            while write & (rest > 0):
                columns = (rest + left - 1) // left
                left -= 1
                tile += 1
                tensors.tiles[tile, 0] = Int32(e)
                tensors.tiles[tile, 1] = first
                tensors.tiles[tile, 2] = columns
                first += columns
                rest -= columns

    @cute.jit
    def _before(self, sSum: cute.Tensor, thread: Int32, slots: Int32, tiles: Int32):
        """The sums of both over all threads before this one."""
        lane, warp = thread % 32, thread // 32
        a, b = slots, tiles
        for step in cutlass.range_constexpr(5):
            x, y = (cute.arch.shuffle_sync_up(v, 1 << step) for v in (a, b))
            a += cutlass.select_(lane >= 1 << step, x, Int32(0))
            b += cutlass.select_(lane >= 1 << step, y, Int32(0))
        if lane == 31:
            sSum[warp, 0] = a
            sSum[warp, 1] = b
        cute.arch.barrier()
        for w in cutlass.range(warp, unroll=1):
            a += sSum[w, 0]
            b += sSum[w, 1]
        return a - slots, b - tiles


class SortByWarp(Fixed):
    """Few slots, sorted by one warp for its own CTA: ``order`` and ``tiles`` in shared memory, as ``Tensors`` has them.
    All CTAs find the same."""

    _EACH = WARP_SLOTS // 32  # slots of a lane, 32 apart

    def __init__(self, columns: int, memory: Any):
        self.columns = columns
        self.sOrder = memory.allocate_tensor(Int32, cute.make_layout(WARP_SLOTS), 16)
        lines = cute.make_layout((1 + WARP_SLOTS, 4), stride=(4, 1))
        self.sTiles = memory.allocate_tensor(Int32, lines, 16)

    @cute.jit
    def run(self, tensors: Tensors):
        """Every lane compares the experts of its slots with those of all others."""
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        slots = Int32(tensors.indices.shape[0]) * top_k
        lane_slots = [lane + 32 * i for i in range(self._EACH)]
        experts = []
        for slot in lane_slots:
            known = cutlass.min(slot, slots - 1)
            e = chosen(tensors, known // top_k, known % top_k)
            experts.append(cutlass.select_(slot < slots, e, Int32(-1)))
        # Slots of the same expert, those of them that come before, and slots of experts that come before.
        count, rank, first = ([Int32(0)] * self._EACH for _ in range(3))
        for other in cutlass.range(slots, unroll=1):
            e = self._of(experts, other)
            same = [self._one(x == e) for x in experts]
            count = [n + x for n, x in zip(count, same, strict=True)]
            rank = [n + self._one(other < slot) * x for n, slot, x in zip(rank, lane_slots, same, strict=True)]
            first = [n + self._one((e >= 0) & (e < x)) for n, x in zip(first, experts, strict=True)]
        tiles = [(n + self.columns - 1) // self.columns for n in count]  # of the slot's expert
        begins = [
            cutlass.select_((n == 0) & (e >= 0), t, Int32(0)) for n, e, t in zip(rank, experts, tiles, strict=True)
        ]
        before, total = [Int32(0)] * self._EACH, Int32(0)
        for other in cutlass.range(slots, unroll=1):
            e, n = self._of(experts, other), self._of(begins, other)
            before = [x + self._one(e < expert) * n for x, expert in zip(before, experts, strict=True)]
            total += n
        if lane == 0:
            self.sTiles[0, 0] = total
        for i in cutlass.range_constexpr(self._EACH):
            if experts[i] >= 0:
                self.sOrder[first[i] + rank[i]] = lane_slots[i]
            for tile in cutlass.range(begins[i], unroll=1):
                # As many tokens each, or one more.
                size, more = count[i] // tiles[i], count[i] % tiles[i]
                line = 1 + before[i] + tile
                self.sTiles[line, 0] = experts[i]
                self.sTiles[line, 1] = first[i] + tile * size + cutlass.min(tile, more)
                self.sTiles[line, 2] = size + self._one(tile < more)
        cute.arch.sync_warp()

    def _of(self, values: list[Int32], slot: Int32) -> Int32:
        """The value of the lane that has a slot."""
        found = cute.arch.shuffle_sync(values[0], slot % 32)
        for i in range(1, self._EACH):
            found = cutlass.select_(slot >= 32 * i, cute.arch.shuffle_sync(values[i], slot % 32), found)
        return found

    def _one(self, condition: Any) -> Int32:
        return cutlass.select_(condition, Int32(1), Int32(0))


class SortByGrid:
    """By all CTAs. ``order`` has the row of every slot, -1 for a choice of no expert, and behind these every slot's
    rank among those of its expert.

    CTAs take shares of the slots by atomics and count in device memory; when all shares are done, each sums the counts
    for itself. Only shares that a CTA has taken are waited for, so no CTA waits for one that has not started. ``count``
    is (1, 3 + experts): shares taken, shares done, CTAs through, and slots of every expert.
    """

    _TAKEN, _DONE, _THROUGH, _COUNTS = range(4)

    def __init__(self, columns: int, experts: int, threads: int):
        self.sort, self.experts, self.threads = Sort(columns, experts, threads), experts, threads

    @cute.jit
    def run(self, tensors: Tensors, memory: Any):
        """All threads of all CTAs. Returns every expert's first row, in shared memory; ``order`` is only partly
        written, unlike the slots' ranks."""
        sFirst = memory.allocate_tensor(Int32, cute.make_layout(self.experts), 16)
        sSum = memory.allocate_tensor(Int32, cute.make_layout((self.threads // 32, 2)), 16)
        sTaken = memory.allocate_tensor(Int32, cute.make_layout(1), 16)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        slots = Int32(tensors.indices.shape[0]) * Int32(tensors.indices.shape[1])
        shares = (slots + self.threads - 1) // self.threads
        self._count(tensors, sTaken, thread, slots, shares)
        if thread == 0:
            done = tensors.count.iterator.toint() + 4 * self._DONE
            while memory_ops.load_acquire(done) < shares:
                pass
        cute.arch.barrier()
        experts = Int32(tensors.up.packed.shape[0])
        for e in cutlass.range(thread, experts, self.threads, unroll=1):
            sFirst[e] = tensors.count[0, self._COUNTS + e]
        cute.arch.barrier()
        self.sort.tiles(tensors, sFirst, sSum, thread, experts, block == 0)
        cute.arch.barrier()
        first, step = block * self.threads + thread, cute.arch.grid_dim()[0] * self.threads
        for slot in cutlass.range(first, slots, step, unroll=1):
            tensors.order[slot] = self.dest_row(tensors, sFirst, slot)
        return sFirst

    @cute.jit
    def _count(self, tensors: Tensors, sTaken: cute.Tensor, thread: Int32, slots: Int32, shares: Int32):
        counter = tensors.count.iterator.toint()
        top_k = Int32(tensors.indices.shape[1])
        share = self._take(tensors, sTaken, thread)
        while share < shares:
            slot = share * self.threads + thread
            if slot < slots:
                number, e = Int32(-1), chosen(tensors, slot // top_k, slot % top_k)
                if e >= 0:
                    at = tensors.count.iterator + (self._COUNTS + e)
                    number = cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="gpu")
                tensors.order[slots + slot] = number
            cute.arch.barrier()
            if thread == 0:
                op.add_acq_rel(counter + 4 * self._DONE, Int32(1))
            share = self._take(tensors, sTaken, thread)

    @cute.jit
    def _take(self, tensors: Tensors, sTaken: cute.Tensor, thread: Int32):
        cute.arch.barrier()  # all have read the last one
        if thread == 0:
            at = tensors.count.iterator + self._TAKEN
            sTaken[0] = cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.barrier()
        return sTaken[0]

    @cute.jit
    def dest_row(self, tensors: Tensors, sFirst: cute.Tensor, slot: Int32):
        """-1 for a choice of no expert."""
        top_k = Int32(tensors.indices.shape[1])
        slots = Int32(tensors.indices.shape[0]) * top_k
        dest, e = Int32(-1), chosen(tensors, slot // top_k, slot % top_k)
        if e >= 0:
            dest = sFirst[e] + tensors.order[slots + slot]
        return dest

    @cute.jit
    def end(self, tensors: Tensors):
        """The last CTA to arrive resets all counters."""
        thread, last = cute.arch.thread_idx()[0], Int32(0)
        if thread == 0:
            arrived = op.add_acq_rel(tensors.count.iterator.toint() + 4 * self._THROUGH, Int32(1))
            last = cutlass.select_(arrived == cute.arch.grid_dim()[0] - 1, Int32(1), Int32(0))
        if op.any_of_threads(last, 0, self.threads) != 0:
            counters = Int32(tensors.up.packed.shape[0]) + self._COUNTS
            for i in cutlass.range(thread, counters, self.threads, unroll=1):
                tensors.count[0, i] = Int32(0)


class WorkTile(NamedTuple):
    expert: Int32
    first: Int32  # row of its first token in the order of experts
    columns: Int32  # tokens
    row: Int32  # number of its rows' tile


class StaticScheduler(NamedTuple):
    """A CTA's tiles: every ``blocks``-th, those of an expert consecutive."""

    block: Int32
    blocks: Int32
    row_tiles: Int32
    count: Int32

    def tile(self, tensors: Tensors, tile_idx: Int32) -> WorkTile:
        unit = self.block + tile_idx * self.blocks
        line = 1 + unit // self.row_tiles
        expert, first, columns = (tensors.tiles[line, i] for i in range(3))
        return WorkTile(expert, first, columns, unit % self.row_tiles)

    def prefetch(self, tensors: Tensors, tile_idx: Int32) -> None:
        """Prefetch what ``tile`` reads; beyond the last tile, the last's."""
        unit = self.block + cutlass.min(tile_idx, self.count - 1) * self.blocks
        memory_ops.prefetch(tensors.tiles.iterator.toint() + Int64(1 + unit // self.row_tiles) * 16)


def static_scheduler(tensors: Tensors, row_tiles: Int32) -> StaticScheduler:
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    units = tensors.tiles[0, 0] * row_tiles
    count = cutlass.max((units - block + blocks - 1) // blocks, Int32(0))
    return StaticScheduler(block, blocks, row_tiles, count)
