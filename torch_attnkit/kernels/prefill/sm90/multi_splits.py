"""Splits of a work tile that persistent CTAs have: the last to come adds to its own what the others left.

A split lies in the workspace as lanes have it, so that it is added in registers. Nobody waits: who is not the last
leaves its rows and goes on. Most tiles have two splits, of which one is the first that its CTA has and one the last, so
the second comes much later than the first. Splits are added in their order, whoever does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import joining, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.warp_ops import exp2

from .mainloop import WARPGROUP, Consumer
from .multi_blocks import WorkTile
from .plan import split_floats

_VECTOR = 16  # bytes: of a row columns 16 j + 2 l and the next, for a lane's l of four, and those 8 further on
_AT_ONCE = 8  # vectors that a thread has on the way while it adds splits


class Slots(NamedTuple):
    """Where the splits of a work tile are."""

    first: Int32  # slot of the first
    rest: Int32  # of the second, from which on every other slot has one
    count: Int32
    mine: Int32  # which of them is this CTA's

    def of(self, split: Int32) -> Int32:
        return cutlass.select_(split == 0, self.first, self.rest + 2 * (split - 1))


class Splits(Fixed):
    """The workspace at ``splits`` with a counter for each CTA at ``count``; ``sCame``: two words of shared memory.

    ``await_consumers`` is the barrier of all consumers.
    """

    def __init__(
        self, config: Any, await_consumers: Callable[[], None], splits: Int64, count: Int64, sCame: cute.Tensor
    ):
        self.c, self.await_consumers = config, await_consumers
        self.splits, self.count, self.sCame = splits, count, sCame

    @cute.jit
    def is_last(self, w: Consumer, tile: WorkTile, slots: Slots, first: Int32, sums: list):
        """Whether all other splits of the tile are there; if not, this one is left. ``first`` is the CTA with the
        first."""
        counter, thread = self.count + Int64(first) * 4, cute.arch.thread_idx()[0] - WARPGROUP
        others = slots.count - 1
        self.await_consumers()  # nobody looks at the words of the part before
        if thread == 0:
            self.sCame[0] = memory_ops.load_acquire(counter)
        self.await_consumers()
        came = self.sCame[0]
        if came < others:
            self._leave(w, tile, slots.of(slots.mine), sums)
            self.await_consumers()
            if thread == 0:
                self.sCame[1] = op.add_acq_rel(counter, Int32(1))
            self.await_consumers()
            came = self.sCame[1]
        last = came == others
        if last & (thread == 0):
            joining.store_relaxed(counter, Int32(0))  # all have counted themselves
        return last

    def _at(self, slot: Int32) -> Int64:
        return self.splits + Int64(slot) * (4 * split_floats(self.c.tile_m, self.c.dim_v))

    def _stats(self, slot: Int32, row: Int32) -> Int64:
        return self._at(slot) + 4 * self.c.tile_m * self.c.dim_v + row * 8

    @cute.jit
    def _leave(self, w: Consumer, tile: WorkTile, slot: Int32, sums: list):
        """This warpgroup's rows: numerators, then a maximum, in powers of two, and a sum of each."""
        thread, at = cute.arch.thread_idx()[0] - WARPGROUP, self._at(slot)
        if thread // 32 * 16 < tile.rows:
            for v in cutlass.range_constexpr(self.c.dim_v // 8):
                op.store_4_floats(at + self._vector(v, thread), [w.rO[i] for i in _elements(v)])
            if w.lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    memory_ops.store_2_floats(self._stats(slot, w.row + 8 * r), [_maximum(w, sums, r), sums[r]])

    def _vector(self, v: int, thread: Int32) -> Int32:
        return (v * self.c.threads + thread) * _VECTOR

    @cute.jit
    def add(self, w: Consumer, tile: WorkTile, slots: Slots, sums: list):
        """Makes this warpgroup's rows those of all splits; returns their maxima, in powers of two, and sums."""
        c, thread = self.c, cute.arch.thread_idx()[0] - WARPGROUP
        own = [_maximum(w, sums, r) for r in range(2)]
        rMax, rAll = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        rSum = cute.make_rmem_tensor(4 * _AT_ONCE, Float32)
        rMax[0], rMax[1] = own
        rAll.fill(0.0)
        if thread // 32 * 16 < tile.rows:
            for split in cutlass.range(slots.count, unroll=1):
                if split != slots.mine:
                    stats = self._stats_of(w, slots.of(split))
                    rMax[0], rMax[1] = (cute.arch.fmax(rMax[r], stats[r][0]) for r in range(2))
            for begin in cutlass.range_constexpr(0, c.dim_v // 8, _AT_ONCE):
                vectors = const_expr(list(range(begin, min(begin + _AT_ONCE, c.dim_v // 8))))
                rSum.fill(0.0)
                rAll.fill(0.0)
                for split in cutlass.range(slots.count, unroll=1):
                    self._count_in(w, slots, split, thread, vectors, (own, sums), rMax, rAll, rSum)
                for n in cutlass.range_constexpr(len(vectors)):
                    for x in cutlass.range_constexpr(4):
                        w.rO[_elements(vectors[n])[x]] = rSum[4 * n + x]
        return [rMax[0], rMax[1]], [rAll[0], rAll[1]]

    def _stats_of(self, w: Consumer, slot: Int32) -> list:
        """(maximum, sum) of this lane's two rows."""
        return [op.load_2_floats(self._stats(slot, w.row + 8 * r)) for r in range(2)]

    def _count_in(
        self, w: Consumer, slots: Slots, split: Int32, thread: Int32, vectors: list[int], own: tuple, rMax: cute.Tensor,
        rAll: cute.Tensor, rSum: cute.Tensor,
    ) -> None:  # fmt: skip
        """One split more, this CTA's from registers."""
        mine, slot = split == slots.mine, slots.of(split)
        there = cutlass.select_(mine, Int32(0), Int32(1))
        # In the place of its own it reads some other's statistics, which are written.
        stats = self._stats_of(
            w, cutlass.select_(mine, slots.of(cutlass.select_(split == 0, Int32(1), Int32(0))), slot)
        )
        news = [memory_ops.load_4_floats_if(self._at(slot) + self._vector(v, thread), there) for v in vectors]
        weights = []
        for r in range(2):
            row_max, row_sum = (cutlass.select_(mine, own[i][r], stats[r][i]) for i in range(2))
            weights.append(exp2(row_max - finite(rMax[r])))
            rAll[r] = op.fma(weights[r], row_sum, rAll[r])
        for n, v in enumerate(vectors):
            for x, i in enumerate(_elements(v)):
                value = cutlass.select_(mine, w.rO[i], news[n][x])
                rSum[4 * n + x] = op.fma(weights[v % 2], value, rSum[4 * n + x])


def _elements(v: int) -> list[int]:
    """Of vector v, in a lane's output: its row is the lane's first or second by turns."""
    first = v // 2 * 8 + v % 2 * 2
    return [first, first + 1, first + 4, first + 5]


def _maximum(w: Consumer, sums: list, r: int) -> Float32:
    """Of a lane's row, in powers of two; -inf without keys."""
    return cutlass.select_(sums[r] == 0.0, -Float32.inf, w.row_max[r] * w.scalars.scale_log2)
