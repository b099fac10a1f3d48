"""From choices to work: slots in the order of their experts, and the work tiles of each expert.

One block counts the choices of every expert, adds the counts up, and puts every slot where the next one of its expert
goes. In which order an expert's slots come is left to chance and changes no result: a token's sums do not depend on
what else is in its work tile. Imports cutlass.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .arguments import Tensors, chosen

THREADS = 1024
_AT_ONCE = 8  # slots whose choices a thread has on their way


class Sort:
    """``columns``: tokens of a work tile; ``experts``: at least as many as there are. With ``inverse``, ``order`` has
    the place of every slot instead, -1 for a choice of no expert."""

    def __init__(self, columns: int, experts: int, inverse: bool = False, threads: int = THREADS):
        self.columns, self.experts, self.inverse, self.threads = columns, experts, inverse, threads

    def launch(self, tensors: Tensors, stream: Any) -> None:
        self.kernel(tensors).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors):
        self.run(tensors, cutlass.memory.SmemAllocator())

    @cute.jit
    def run(self, tensors: Tensors, memory: Any):
        """All threads of one block."""
        sCount = memory.allocate_tensor(Int32, cute.make_layout(self.experts), 16)
        sSum = memory.allocate_tensor(Int32, cute.make_layout((self.threads // 32, 2)), 16)
        thread = cute.arch.thread_idx()[0]
        experts, top_k = Int32(tensors.up.codes.shape[0]), Int32(tensors.indices.shape[1])
        slots = Int32(tensors.indices.shape[0]) * top_k
        for e in cutlass.range(thread, experts, self.threads, unroll=1):
            sCount[e] = Int32(0)
        cute.arch.barrier()
        for first in cutlass.range(thread, slots, self.threads * _AT_ONCE, unroll=1):
            for e in self._choices(tensors, first, slots, top_k):
                if e >= 0:
                    cute.arch.atomic_add(sCount.iterator + e, Int32(1), sem="relaxed", scope="cta")
        cute.arch.barrier()
        self._tiles(tensors, sCount, sSum, thread, experts)
        cute.arch.barrier()
        for first in cutlass.range(thread, slots, self.threads * _AT_ONCE, unroll=1):
            for i, e in enumerate(self._choices(tensors, first, slots, top_k)):
                place = Int32(-1)
                if e >= 0:
                    place = cute.arch.atomic_add(sCount.iterator + e, Int32(1), sem="relaxed", scope="cta")
                self._put(tensors, first + i * self.threads, place, slots)

    @cute.jit
    def _put(self, tensors: Tensors, slot: Int32, place: Int32, slots: Int32):
        if const_expr(self.inverse):
            if slot < slots:
                tensors.order[slot] = place
        elif place >= 0:
            tensors.order[place] = slot

    def _choices(self, tensors: Tensors, first: Int32, slots: Int32, top_k: Int32) -> list[Int32]:
        """The experts of every ``self.threads``-th slot from ``first`` on, -1 beyond the last."""
        at = [cutlass.min(first + i * self.threads, slots - 1) for i in range(_AT_ONCE)]
        experts = [chosen(tensors, slot // top_k, slot % top_k) for slot in at]
        return [cutlass.select_(first + i * self.threads < slots, e, Int32(-1)) for i, e in enumerate(experts)]

    @cute.jit
    def _tiles(self, tensors: Tensors, sCount: cute.Tensor, sSum: cute.Tensor, thread: Int32, experts: Int32):
        """Counts become first places, and an expert's tokens work tiles of equal sizes, or nearly; a thread has
        neighbouring experts."""
        each = (experts + self.threads - 1) // self.threads
        begin, end = cutlass.min(thread * each, experts), cutlass.min((thread + 1) * each, experts)
        slots, tiles = Int32(0), Int32(0)
        for e in cutlass.range(begin, end, unroll=1):
            slots += sCount[e]
            tiles += (sCount[e] + self.columns - 1) // self.columns
        first, tile = self._before(sSum, thread, slots, tiles)
        if thread == self.threads - 1:
            tensors.tiles[0, 0] = tile + tiles
        for e in cutlass.range(begin, end, unroll=1):
            rest = sCount[e]
            sCount[e] = first
            left = (rest + self.columns - 1) // self.columns
            while rest > 0:
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
