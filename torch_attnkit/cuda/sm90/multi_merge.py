"""What becomes of a tile's rows when their last key is through: a store, or a merge across the CTAs of a cluster."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import warp_ops as op
from ..partials import finite, join
from ..warp_ops import exp2
from . import prefill_softmax as softmax
from .multi_tiles import Task
from .multi_types import Config, Inputs, Outputs, Scalars

_AT_ONCE = 8  # parts that a thread has on the way while it merges


def keep_near_and_sinks(acc: cute.Tensor, near: tuple, sinks: Int32, sinks_ends: list) -> None:
    """-inf where the column is neither in the row's [low, high) nor one of its sink tokens."""
    for i in range(cute.size(acc)):
        column, row = Int32(i // 4 * 8 + i % 2), i // 2 % 2
        seen = ((column >= near[0][row]) & (column < near[1][row])) | ((column >= sinks) & (column < sinks_ends[row]))
        acc[i] = cutlass.select_(seen, acc[i], -Float32.inf)


def row_sums(w) -> list:
    """The sums of a lane's two rows; 0 for a query before the cache's first key, which attends nothing.

    Then its output is 0 too: what it holds may be nan, which no factor removes.
    """
    sums = []
    for r in range(2):
        total = w.total[r]
        for distance in (1, 2):
            total += cute.arch.shuffle_sync_bfly(total, offset=distance)
        sums.append(cutlass.select_(w.positions[r] < 0, Float32(0.0), total))
    for i in range(cute.size(w.rO)):
        w.rO[i] = cutlass.select_(sums[i // 2 % 2] == 0.0, Float32(0.0), w.rO[i])
    return sums


@cute.jit
def _weighed(ins: Inputs, scalars: Scalars, head: Int32, top: Float32, total: Float32):
    """The LSE of a row with maximum ``top``, in powers of two, and what its sums are to be multiplied by."""
    lse = (finite(top) + op.log2(total)) * Float32(softmax.LN_2)
    weight = total
    if scalars.has_sink != 0:
        weight += exp2(Float32(ins.sink[head]) * Float32(softmax.LOG2_E) - finite(top))
    nothing = total == 0.0
    inverse = cute.arch.rcp_approx(cutlass.select_(nothing, Float32(1.0), weight))
    return cutlass.select_(nothing, -Float32.inf, lse), cutlass.select_(nothing, Float32(0.0), inverse)


@cute.jit
def store(c: cutlass.Constexpr, w, ins: Inputs, outs: Outputs, task: Task, sums):
    """Divide by the row sums and write out straight from registers, 16 bytes a lane."""
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        token, head = task.place(cutlass.max(cutlass.min(row, task.rows - 1), 0))
        lse, factor = _weighed(ins, w.scalars, head, w.top[r] * w.scalars.scale_log2, sums[r])
        if (w.lane % 4 == 0) & (row < task.rows):
            outs.lse[task.batch, token, head] = lse
        address = outs.out[task.batch, token, head, None].iterator.toint() + w.lane % 4 * 16
        for g in cutlass.range_constexpr(c.dim_v // 32):
            pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
            words = [softmax.pack(w.rO[i] * factor, w.rO[i + 1] * factor, c.dtype) for i in pairs]
            words = softmax.transpose_quads(words, w.lane % 4)
            if row < task.rows:
                target = cute.make_tensor(
                    cute.make_ptr(Int32, address + 64 * g, cute.AddressSpace.gmem, assumed_align=16),
                    cute.make_layout(4),
                )
                values = cute.make_rmem_tensor(4, Int32)
                for j in cutlass.range_constexpr(4):
                    values[j] = words[j]
                cute.autovec_copy(values, target)


def _stats_offset(c: Config) -> int:
    """Where the statistics of a partial result begin, behind its output; bytes."""
    return c.tile_m * c.pitch * 4


def _vector(address: Int32, count: int) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def publish(c: cutlass.Constexpr, w, shared: Int32, sums):
    """This warpgroup's rows into shared memory: the output, a maximum in powers of two, and a sum."""
    two = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        at = shared + (row * c.pitch + w.lane % 4 * 2) * 4
        for v in cutlass.range_constexpr(c.dim_v // 8):
            two[0], two[1] = w.rO[4 * v + 2 * r], w.rO[4 * v + 2 * r + 1]
            cute.autovec_copy(two, _vector(at + 32 * v, 2))
        if w.lane % 4 == 0:
            two[0] = cutlass.select_(sums[r] == 0.0, -Float32.inf, w.top[r] * w.scalars.scale_log2)
            two[1] = sums[r]
            cute.autovec_copy(two, _vector(shared + _stats_offset(c) + row * 8, 2))


@cute.jit
def add(c: cutlass.Constexpr, ins: Inputs, outs: Outputs, scalars: Scalars, task: Task, shared: Int32):
    """This CTA's slice of the tile: the sum over all CTAs, four columns a thread."""
    thread, rank = cute.arch.thread_idx()[0] % c.threads, cute.arch.block_in_cluster_idx()[0]
    vectors = const_expr(c.dim_v // 4)
    for index in cutlass.range(rank * c.threads + thread, task.rows * vectors, c.threads * scalars.ctas, unroll=1):
        row, column = index // vectors, index % vectors * 4
        o_at = shared + (row * c.pitch + column) * 4
        stat_at = shared + _stats_offset(c) + row * 8
        rO = cute.make_rmem_tensor(4, Float32)
        rO.fill(0.0)
        top, total = Float32(-Float32.inf), Float32(0.0)
        for first in cutlass.range(0, scalars.ctas, _AT_ONCE, unroll=1):
            # All loads are on their way before the first is used.
            there = [cutlass.select_(first + i < scalars.ctas, Int32(1), Int32(0)) for i in range(_AT_ONCE)]
            peers = [(first + i) * there[i] for i in range(_AT_ONCE)]
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peers[i]), there[i]) for i in range(_AT_ONCE)
            ]
            news = [op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), there[i]) for i in range(_AT_ONCE)]
            tops = [cutlass.select_(there[i] != 0, stats[i][0], -Float32.inf) for i in range(_AT_ONCE)]
            top, total = join(rO, top, total, tops, [s[1] for s in stats], news)
        token, head = task.place(row)
        lse, factor = _weighed(ins, scalars, head, top, total)
        pairs = [op.pack(c.dtype, rO[x] * factor, rO[x + 1] * factor) for x in (0, 2)]
        op.store_2_pairs(Int64(outs.out[task.batch, token, head, None].iterator.toint()) + column * 2, *pairs)
        if column == 0:
            outs.lse[task.batch, token, head] = lse
