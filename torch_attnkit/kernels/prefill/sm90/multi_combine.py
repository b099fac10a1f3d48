"""What becomes of a tile's rows when their last key is through: a store, or a sum over the CTAs of a cluster."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import exp2

from .mainloop import Consumer
from .multi_blocks import WorkTile
from .multi_types import Config, Inputs, Outputs, Scalars

_FLOAT = Float32.width // 8  # bytes
_AT_ONCE = 8  # partial results that a thread has on the way while it combines them


def row_sums(c: Any, w: Consumer, positions: tuple) -> list:
    """The sums of a lane's two rows; 0 for a query before a cache's first key, which attends nothing.

    Then its output is 0 too: what it holds may be nan, which no factor removes.
    """
    sums = []
    for r in range(2):
        row_sum = softmax.quad_sum(w.row_sum[r])
        sums.append(cutlass.select_(positions[r] < 0, Float32(0.0), row_sum) if c.ends_at_kv_len else row_sum)
    for i in range(cute.size(w.rO)):
        w.rO[i] = cutlass.select_(sums[i // 2 % 2] == 0.0, Float32(0.0), w.rO[i])
    return sums


@cute.jit
def weighed(ins: Inputs, scalars: Scalars, head: Int32, row_max: Float32, row_sum: Float32):
    """The LSE of a row with maximum ``row_max``, in powers of two, and what its sums are to be multiplied by."""
    lse = (finite(row_max) + op.log2(row_sum)) * Float32(op.LN_2)
    weight = row_sum
    if scalars.has_sink != 0:
        weight += exp2(Float32(ins.sink[head]) * Float32(op.LOG2_E) - finite(row_max))
    nothing = row_sum == 0.0
    inverse = cute.arch.rcp_approx(cutlass.select_(nothing, Float32(1.0), weight))
    return cutlass.select_(nothing, -Float32.inf, lse), cutlass.select_(nothing, Float32(0.0), inverse)


@cute.jit
def store(c: cutlass.Constexpr, w: Consumer, ins: Inputs, outs: Outputs, tile: WorkTile, sums, maxima=None):
    """Divide by the row sums and write out straight from registers, 16 bytes a lane; ``maxima`` in powers of two, where
    they are not the consumer's."""
    nbytes = const_expr(c.out_dtype.width // 8)
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        token, head = tile.token_and_head(cutlass.max(cutlass.min(row, tile.rows - 1), 0))
        row_max = w.row_max[r] * w.scalars.scale_log2 if const_expr(maxima is None) else maxima[r]
        lse, factor = weighed(ins, w.scalars, head, row_max, sums[r])
        if (w.lane % 4 == 0) & (row < tile.rows):
            outs.lse[tile.batch, token, head] = lse
        address = outs.out[tile.batch, token, head, None].iterator.toint() + w.lane % 4 * (8 * nbytes)
        for g in cutlass.range_constexpr(c.dim_v // 32):
            pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
            words = [op.pack(c.out_dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i in pairs]
            words = softmax.transpose_quads(words, w.lane % 4)
            if row < tile.rows:
                copies.store_words(address + 32 * nbytes * g, words)


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
def combine(c: cutlass.Constexpr, ins: Inputs, outs: Outputs, scalars: Scalars, tile: WorkTile, shared: Int32):
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
        for first in cutlass.range(0, scalars.ctas, _AT_ONCE, unroll=1):
            # All loads are on their way before the first is used.
            there = [cutlass.select_(first + i < scalars.ctas, Int32(1), Int32(0)) for i in range(_AT_ONCE)]
            peers = [(first + i) * there[i] for i in range(_AT_ONCE)]
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peers[i]), there[i]) for i in range(_AT_ONCE)
            ]
            news = [op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), there[i]) for i in range(_AT_ONCE)]
            maxima = [cutlass.select_(there[i] != 0, stats[i][0], -Float32.inf) for i in range(_AT_ONCE)]
            row_max, row_sum = join(rO, row_max, row_sum, maxima, [s[1] for s in stats], news)
        token, head = tile.token_and_head(row)
        lse, factor = weighed(ins, scalars, head, row_max, row_sum)
        pairs = [op.pack(c.out_dtype, rO[x] * factor, rO[x + 1] * factor) for x in (0, 2)]
        op.store_2_pairs(
            Int64(outs.out[tile.batch, token, head, None].iterator.toint()) + column * (c.out_dtype.width // 8), *pairs
        )
        if column == 0:
            outs.lse[tile.batch, token, head] = lse
