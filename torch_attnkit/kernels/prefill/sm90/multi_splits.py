"""Splits of a work tile that persistent CTAs brought: in the workspace as lanes have them, joined by all who have one.

A vector is four numbers of a row: columns 16 j + 2 l and the next, for a lane's l of four, and those 8 further on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import joining, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.warp_ops import exp2

from .mainloop import WARPGROUP, Consumer
from .multi_blocks import WorkTile
from .multi_combine import weighed
from .multi_plan import split_floats
from .multi_types import Config, Inputs, Outputs, Scalars

_VECTOR = 16  # bytes
_AT_ONCE = 8  # splits of which a thread has the statistics on the way


def _address(c: Config, splits: Int64, slot: Int32) -> Int64:
    return splits + Int64(slot) * (4 * split_floats(c.tile_m, c.dim_v))


def _stats(c: Config) -> int:
    """Bytes before the statistics of a split."""
    return 4 * c.tile_m * c.dim_v


def _lanes(rows: Int32) -> Int32:
    """That have rows of a tile: warps have 16 each."""
    return (rows + 15) // 16 * 32


@cute.jit
def leave(c: cutlass.Constexpr, w: Consumer, tile: WorkTile, splits: Int64, slot: Int32, sums):
    """This warpgroup's rows into a slot of the workspace."""
    thread, lanes, at = cute.arch.thread_idx()[0] - WARPGROUP, _lanes(tile.rows), _address(c, splits, slot)
    if thread < lanes:
        for v in cutlass.range_constexpr(c.dim_v // 8):
            first = const_expr(v // 2 * 8 + v % 2 * 2)
            op.store_4_floats(at + (v * lanes + thread) * _VECTOR, [w.rO[first + x] for x in (0, 1, 4, 5)])
        if w.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                row_max = cutlass.select_(sums[r] == 0.0, -Float32.inf, w.row_max[r] * w.scalars.scale_log2)
                memory_ops.store_2_floats(at + _stats(c) + (w.row + 8 * r) * 8, [row_max, sums[r]])


class Slots(NamedTuple):
    """Where the splits of a work tile are."""

    first: Int32  # slot of the first
    rest: Int32  # of the second, from which on every other slot has one
    count: Int32

    def of(self, split: Int32) -> Int32:
        return cutlass.select_(split == 0, self.first, self.rest + 2 * (split - 1))


def vectors(c: Config, tile: WorkTile) -> Int32:
    """Of a split."""
    return _lanes(tile.rows) * (c.dim_v // 8)


def _floats(address: Int32, shape: Any) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(shape))


@cute.jit
def join(
    c: cutlass.Constexpr, ins: Inputs, outs: Outputs, scalars: Scalars, tile: WorkTile, splits: Int64, slots: Slots,
    share: tuple, shared: Int32, meet: cutlass.Constexpr,
):  # fmt: skip
    """A share of a tile's result, vectors [begin, end): it comes to shared memory, which nobody else uses any more, at
    once, while what each split counts is worked out.

    ``share`` is (begin, end, how many vectors there is room for); ``meet()`` is the consumers' barrier.
    """
    begin, end, room = share
    lanes, thread = _lanes(tile.rows), cute.arch.thread_idx()[0] - WARPGROUP
    sWeights = _floats(shared + room * slots.count * _VECTOR, (c.tile_m, slots.count))
    for first in cutlass.range(begin, end, room, unroll=1):
        many = cutlass.min(room, end - first)
        for i in cutlass.range(thread, many * slots.count, c.threads, unroll=4):
            split = i // many
            source = _address(c, splits, slots.of(split)) + (first + i - split * many) * _VECTOR
            op.copy_16_async(shared + i * _VECTOR, source, Int32(_VECTOR))
        cute.arch.cp_async_commit_group()
        _weigh(c, ins, outs, scalars, tile, splits, slots, sWeights, first == 0)
        cute.arch.cp_async_wait_group(0)
        meet()
        for i in cutlass.range(thread, many, c.threads, unroll=1):
            lane, v = (first + i) % lanes, (first + i) // lanes
            row = lane // 32 * 16 + lane % 32 // 4 + v % 2 * 8
            if row < tile.rows:
                sums = [Float32(0.0)] * 4
                for n in cutlass.range(slots.count, unroll=4):
                    part, weight = _floats(shared + (n * many + i) * _VECTOR, 4), sWeights[row, n]
                    sums = [sums[x] + weight * part[x] for x in range(4)]
                token, head = tile.token_and_head(row)
                column = v // 2 * 16 + lane % 4 * 2
                target = outs.out[tile.batch, token, head, None].iterator.toint() + column * (c.out_dtype.width // 8)
                for half in cutlass.range_constexpr(2):
                    pair = op.pack(c.out_dtype, *sums[2 * half : 2 * half + 2])
                    joining.store_word(target + half * c.out_dtype.width, pair)
        meet()


@cute.jit
def _weigh(
    c: cutlass.Constexpr, ins: Inputs, outs: Outputs, scalars: Scalars, tile: WorkTile, splits: Int64, slots: Slots,
    sWeights: cute.Tensor, with_lse: Boolean,
):  # fmt: skip
    """What the numerators of each split count in the result, by two threads a row; the LSE of the tile's rows."""
    thread = cute.arch.thread_idx()[0] - WARPGROUP
    row, mine = thread // 2, thread % 2
    row_max, row_sum = Float32(-Float32.inf), Float32(0.0)
    for first in cutlass.range(mine, slots.count, 2 * _AT_ONCE, unroll=1):
        stats = []
        for i in cutlass.range_constexpr(_AT_ONCE):
            n = cutlass.min(first + 2 * i, slots.count - 1)
            stats.append(op.load_2_floats(_address(c, splits, slots.of(n)) + _stats(c) + row * 8))
        old = row_max
        for i in cutlass.range_constexpr(_AT_ONCE):
            if first + 2 * i < slots.count:
                sWeights[row, first + 2 * i] = stats[i][0]
            row_max = cute.arch.fmax(row_max, stats[i][0])  # beyond the last stands another one of the row
        row_sum = row_sum * exp2(old - finite(row_max))
        for i in cutlass.range_constexpr(_AT_ONCE):
            some = exp2(stats[i][0] - finite(row_max)) * stats[i][1]
            row_sum += cutlass.select_(first + 2 * i < slots.count, some, Float32(0.0))
    other, more = (cute.arch.shuffle_sync_bfly(x, 1) for x in (row_max, row_sum))
    most = cute.arch.fmax(row_max, other)
    parts = row_sum * exp2(row_max - finite(most)), more * exp2(other - finite(most))
    row_max, row_sum = most, parts[0] + parts[1]  # the same bits in both
    token, head = tile.token_and_head(cutlass.min(row, tile.rows - 1))
    lse, factor = weighed(ins, scalars, head, row_max, row_sum)
    if with_lse & (mine == 0) & (row < tile.rows):
        outs.lse[tile.batch, token, head] = lse
    for n in cutlass.range(mine, slots.count, 2, unroll=4):
        sWeights[row, n] = exp2(sWeights[row, n] - finite(row_max)) * factor
