"""Splits of a work tile that persistent CTAs brought: in the workspace as lanes have them, joined by all who have one.

A vector is four numbers of a row: columns 16 j + 2 l and the next, for a lane's l of four, and those 8 further on.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import joining, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import join

from .mainloop import WARPGROUP, Consumer
from .multi_blocks import WorkTile
from .multi_combine import weighed
from .multi_plan import split_floats
from .multi_types import Config, Inputs, Outputs, Scalars

_VECTOR = 16  # bytes
_AT_ONCE = 8  # splits that a thread has on the way


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


def vectors(c: Config, tile: WorkTile) -> Int32:
    """Of a split."""
    return _lanes(tile.rows) * (c.dim_v // 8)


@cute.jit
def join_vectors(
    c: cutlass.Constexpr, ins: Inputs, outs: Outputs, scalars: Scalars, tile: WorkTile, splits: Int64, slots: tuple,
    begin: Int32, end: Int32,
):  # fmt: skip
    """Vectors [begin, end) of a tile's result. ``slots``: of its first split, of the second, from which on every other
    slot has one, and how many splits there are."""
    slot, rest, count = slots
    lanes = _lanes(tile.rows)
    for index in cutlass.range(begin + cute.arch.thread_idx()[0] - WARPGROUP, end, c.threads, unroll=1):
        lane, v = index % lanes, index // lanes
        row = lane // 32 * 16 + lane % 32 // 4 + v % 2 * 8
        if row < tile.rows:
            rO = cute.make_rmem_tensor(4, Float32)
            rO.fill(0.0)
            row_max, row_sum = Float32(-Float32.inf), Float32(0.0)
            for first in cutlass.range(0, count, _AT_ONCE, unroll=1):
                at = []
                for i in cutlass.range_constexpr(_AT_ONCE):
                    n = cutlass.min(first + i, count - 1)
                    at.append(_address(c, splits, cutlass.select_(n == 0, slot, rest + 2 * (n - 1))))
                stats = [op.load_2_floats(a + _stats(c) + row * 8) for a in at]
                news = [op.load_4_floats(a + index * _VECTOR) for a in at]
                maxima = [cutlass.select_(first + i < count, stats[i][0], -Float32.inf) for i in range(_AT_ONCE)]
                row_max, row_sum = join(rO, row_max, row_sum, maxima, [s[1] for s in stats], news)
            token, head = tile.token_and_head(row)
            lse, factor = weighed(ins, scalars, head, row_max, row_sum)
            column = v // 2 * 16 + lane % 4 * 2
            target = outs.out[tile.batch, token, head, None].iterator.toint() + column * (c.out_dtype.width // 8)
            for half in cutlass.range_constexpr(2):
                pair = op.pack(c.out_dtype, rO[2 * half] * factor, rO[2 * half + 1] * factor)
                joining.store_word(target + half * c.out_dtype.width, pair)
            if column == 0:
                outs.lse[tile.batch, token, head] = lse
