"""The sum over the splits of a work tile's keys: in a cluster by distributed shared memory, or by a workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import atomics, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.warp_ops import exp2

from .config import WARPGROUP, Config, GroupScalars, RowOutputs
from .epilogue import lse_and_factor
from .mainloop import Consumer
from .seqlen import WorkTile
from .tiles import split_floats

_FLOAT = Float32.width // 8  # bytes
_BATCH = 8  # partial results, or vectors of them, that a thread has on the way while it combines them
_VECTOR = 16  # bytes: of a row columns 16 j + 2 l and the next, for a lane's l of four, and those 8 further on


# Distributed shared memory.


def _stats_offset(c: Config) -> int:
    """Where the statistics of a partial result begin, behind its output; bytes."""
    return c.tile_m * c.pitch * _FLOAT


def _vector(address: Int32, count: int) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=_FLOAT * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def publish(c: cutlass.Constexpr, w: Consumer, shared: Int32, sums):
    """This warpgroup's rows into shared memory: the output, a maximum in powers of two, and a sum."""
    two = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        at = shared + (row * c.pitch + w.lane % 4 * 2) * _FLOAT
        for v in cutlass.range_constexpr(c.dim_v // 8):
            two[0], two[1] = w.rO[4 * v + 2 * r], w.rO[4 * v + 2 * r + 1]
            cute.autovec_copy(two, _vector(at + 8 * _FLOAT * v, 2))
        if w.lane % 4 == 0:
            two[0] = cutlass.select_(sums[r] == 0.0, -Float32.inf, w.row_max[r] * w.scalars.scale_log2)
            two[1] = sums[r]
            cute.autovec_copy(two, _vector(shared + _stats_offset(c) + row * (2 * _FLOAT), 2))


@cute.jit
def combine(c: cutlass.Constexpr, ins: Any, outs: RowOutputs, scalars: GroupScalars, tile: WorkTile, shared: Int32):
    """This CTA's slice of the tile: the sum over all CTAs, four columns a thread."""
    thread, rank = cute.arch.thread_idx()[0] % c.threads, cute.arch.block_in_cluster_idx()[0]
    vectors = const_expr(c.dim_v // 4)
    for index in cutlass.range(rank * c.threads + thread, tile.rows * vectors, c.threads * scalars.ctas, unroll=1):
        row, column = index // vectors, index % vectors * 4
        o_at = shared + (row * c.pitch + column) * _FLOAT
        stat_at = shared + _stats_offset(c) + row * (2 * _FLOAT)
        rO = cute.make_rmem_tensor(4, Float32)
        rO.fill(0.0)
        row_max, row_sum = Float32(-Float32.inf), Float32(0.0)
        for first in cutlass.range(0, scalars.ctas, _BATCH, unroll=1):
            # All loads are on their way before the first is used.
            valid = [cutlass.select_(first + i < scalars.ctas, Int32(1), Int32(0)) for i in range(_BATCH)]
            peers = [(first + i) * valid[i] for i in range(_BATCH)]
            stats = [op.load_cluster_floats(2, op.cluster_address(stat_at, peers[i]), valid[i]) for i in range(_BATCH)]
            values = [op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), valid[i]) for i in range(_BATCH)]
            maxima = [cutlass.select_(valid[i] != 0, stats[i][0], -Float32.inf) for i in range(_BATCH)]
            row_max, row_sum = join(rO, row_max, row_sum, maxima, [s[1] for s in stats], values)
        token, head = tile.token_and_head(row)
        lse, factor = lse_and_factor(ins, scalars, head, row_max, row_sum)
        pairs = [op.pack(c.out_dtype, rO[x] * factor, rO[x + 1] * factor) for x in (0, 2)]
        op.store_2_pairs(
            Int64(outs.out[tile.batch, token, head, None].iterator.toint()) + column * (c.out_dtype.width // 8), *pairs
        )
        if column == 0:
            outs.lse[tile.batch, token, head] = lse


# The workspace.


class SplitSlots(NamedTuple):
    """Where the splits of a work tile are."""

    first: Int32  # slot of the first
    rest: Int32  # of the second, from which on every other slot has one
    count: Int32
    own: Int32  # which of them is this CTA's

    def of(self, split: Int32) -> Int32:
        return cutlass.select_(split == 0, self.first, self.rest + 2 * (split - 1))


class WorkspaceCombine(Fixed):
    """Of stream-K: the CTA that ends a work tile's last split adds to its own what the others left in device memory.

    A split lies in the workspace as lanes have it, so that it is added in registers. Nobody waits: who is not the last
    leaves its rows and goes on. Most tiles have two splits, of which one is the first that its CTA has and one the
    last, so the second comes much later than the first. Splits are added in their order, whoever does it.

    The workspace is at ``splits``, with a counter for each CTA at ``count``; ``sCount``: two words of shared memory.
    ``await_consumers`` is the barrier of all consumers.
    """

    def __init__(
        self, config: Config, await_consumers: Callable[[], None], splits: Int64, count: Int64, sCount: cute.Tensor
    ):
        self.c, self.await_consumers = config, await_consumers
        self.splits, self.count, self.sCount = splits, count, sCount

    @cute.jit
    def is_last(self, w: Consumer, tile: WorkTile, slots: SplitSlots, first: Int32, sums: list):
        """Whether all other splits of the tile are there; if not, this one is stored. ``first`` is the CTA with the
        first."""
        counter, thread = self.count + Int64(first) * 4, cute.arch.thread_idx()[0] - WARPGROUP
        others = slots.count - 1
        self.await_consumers()  # nobody looks at the words of the part before
        if thread == 0:
            self.sCount[0] = memory_ops.load_acquire(counter)
        self.await_consumers()
        done = self.sCount[0]
        if done < others:
            self._store(w, tile, slots.of(slots.own), sums)
            self.await_consumers()
            if thread == 0:
                self.sCount[1] = op.add_acq_rel(counter, Int32(1))
            self.await_consumers()
            done = self.sCount[1]
        last = done == others
        if last & (thread == 0):
            atomics.store_relaxed(counter, Int32(0))  # all have counted themselves
        return last

    def _at(self, slot: Int32) -> Int64:
        return self.splits + Int64(slot) * (4 * split_floats(self.c.tile_m, self.c.dim_v))

    def _stats(self, slot: Int32, row: Int32) -> Int64:
        return self._at(slot) + 4 * self.c.tile_m * self.c.dim_v + row * 8

    @cute.jit
    def _store(self, w: Consumer, tile: WorkTile, slot: Int32, sums: list):
        """This warpgroup's rows: numerators, then a maximum, in powers of two, and a sum of each."""
        thread, at = cute.arch.thread_idx()[0] - WARPGROUP, self._at(slot)
        if thread // 32 * 16 < tile.rows:
            for v in cutlass.range_constexpr(self.c.dim_v // 8):
                op.store_4_floats(at + self._vector(v, thread), [w.rO[i] for i in _vector_elements(v)])
            if w.lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    memory_ops.store_2_floats(self._stats(slot, w.row + 8 * r), [_maximum(w, sums, r), sums[r]])

    def _vector(self, v: int, thread: Int32) -> Int32:
        return (v * self.c.threads + thread) * _VECTOR

    @cute.jit
    def add(self, w: Consumer, tile: WorkTile, slots: SplitSlots, sums: list):
        """Makes this warpgroup's rows those of all splits; returns their maxima, in powers of two, and sums."""
        c, thread = self.c, cute.arch.thread_idx()[0] - WARPGROUP
        own = [_maximum(w, sums, r) for r in range(2)]
        rMax, rAll = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        rSum = cute.make_rmem_tensor(4 * _BATCH, Float32)
        rMax[0], rMax[1] = own
        rAll.fill(0.0)
        if thread // 32 * 16 < tile.rows:
            for split in cutlass.range(slots.count, unroll=1):
                if split != slots.own:
                    stats = self._stats_of(w, slots.of(split))
                    rMax[0], rMax[1] = (cute.arch.fmax(rMax[r], stats[r][0]) for r in range(2))
            for begin in cutlass.range_constexpr(0, c.dim_v // 8, _BATCH):
                vectors = const_expr(list(range(begin, min(begin + _BATCH, c.dim_v // 8))))
                rSum.fill(0.0)
                rAll.fill(0.0)
                for split in cutlass.range(slots.count, unroll=1):
                    self._add_split(w, slots, split, thread, vectors, (own, sums), rMax, rAll, rSum)
                for n in cutlass.range_constexpr(len(vectors)):
                    for x in cutlass.range_constexpr(4):
                        w.rO[_vector_elements(vectors[n])[x]] = rSum[4 * n + x]
        return [rMax[0], rMax[1]], [rAll[0], rAll[1]]

    def _stats_of(self, w: Consumer, slot: Int32) -> list:
        """(maximum, sum) of this lane's two rows."""
        return [op.load_2_floats(self._stats(slot, w.row + 8 * r)) for r in range(2)]

    def _add_split(
        self, w: Consumer, slots: SplitSlots, split: Int32, thread: Int32, vectors: list[int], own: tuple,
        rMax: cute.Tensor, rAll: cute.Tensor, rSum: cute.Tensor,
    ) -> None:  # fmt: skip
        """One split more, this CTA's from registers."""
        own_split, slot = split == slots.own, slots.of(split)
        needed = cutlass.select_(own_split, Int32(0), Int32(1))
        # In the place of its own it reads some other's statistics, which are written.
        stats = self._stats_of(
            w, cutlass.select_(own_split, slots.of(cutlass.select_(split == 0, Int32(1), Int32(0))), slot)
        )
        values = [memory_ops.load_4_floats_if(self._at(slot) + self._vector(v, thread), needed) for v in vectors]
        weights = []
        for r in range(2):
            row_max, row_sum = (cutlass.select_(own_split, own[i][r], stats[r][i]) for i in range(2))
            weights.append(exp2(row_max - finite(rMax[r])))
            rAll[r] = op.fma(weights[r], row_sum, rAll[r])
        for n, v in enumerate(vectors):
            for x, i in enumerate(_vector_elements(v)):
                value = cutlass.select_(own_split, w.rO[i], values[n][x])
                rSum[4 * n + x] = op.fma(weights[v % 2], value, rSum[4 * n + x])


def _vector_elements(v: int) -> list[int]:
    """Of vector v, in a lane's output: its row is the lane's first or second by turns."""
    first = v // 2 * 8 + v % 2 * 2
    return [first, first + 1, first + 4, first + 5]


def _maximum(w: Consumer, sums: list, r: int) -> Float32:
    """Of a lane's row, in powers of two; -inf without keys."""
    return cutlass.select_(sums[r] == 0.0, -Float32.inf, w.row_max[r] * w.scalars.scale_log2)
