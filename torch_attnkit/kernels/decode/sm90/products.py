"""What the ``wgmma`` kernels of Hopper have in common: a group's query heads are the 64 rows of both products."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.sm90.wgmma import first_row, lanes_sum
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import tanh

from ..arguments import Scalars, Tensors
from ..combine import result_tensors
from ..schedule import WorkTile

_INF = float("inf")


@cute.jit
def scores(
    scalars: Scalars, rS: cute.Tensor, thread: Int32, first: Int32, low: Int32, high: Int32, keys: cutlass.Constexpr
):
    """Products to scores in powers of two, -inf where a key of the tile does not count."""
    for i in cutlass.range_constexpr(cute.size(rS)):
        rS[i] = rS[i] * scalars.scale
    if scalars.cap > 0:
        for i in cutlass.range_constexpr(cute.size(rS)):
            rS[i] = scalars.cap * tanh(rS[i])
    if (low > first) | (high < first + keys):
        key = first + (thread & 3) * 2
        for i in cutlass.range_constexpr(cute.size(rS)):
            column = key + (i // 4 * 8 + i % 2)
            rS[i] = cutlass.select_((column >= low) & (column < high), rS[i], Float32(-_INF))


@cute.jit
def load_query(
    tensors: Tensors, tile: WorkTile, address: Int32, thread: Int32, threads: cutlass.Constexpr, dim: cutlass.Constexpr,
    size: cutlass.Constexpr,
):  # fmt: skip
    """Start this thread's part of the copy of Q, in elements of ``size`` bytes; rows beyond the group's heads become
    zeros."""
    words = const_expr(dim * size // 4)  # of a row
    row_bytes = Int64(tensors.q.stride[1]) * size
    start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * size + row_bytes * tile.head
    if (start | row_bytes) % CHUNK == 0:
        for i in cutlass.range(HEADS * words // 4 // threads, unroll=8):
            row, chunk = (i * threads + thread) // (words // 4), (i * threads + thread) % (words // 4)
            at = address + row * ROW_BYTES + chunk // 8 * (HEADS * ROW_BYTES) + ((chunk % 8) ^ (row & 7)) * CHUNK
            valid = cutlass.select_(row < tile.heads, Int32(CHUNK), Int32(0))
            op.copy_16_async(at, start + row_bytes * row + chunk * CHUNK, valid)
    else:
        for i in cutlass.range(HEADS * words // threads, unroll=8):
            row, word = (i * threads + thread) // words, (i * threads + thread) % words
            at = address + row * ROW_BYTES + word // 32 * (HEADS * ROW_BYTES) + word % 4 * 4
            at += ((word // 4 % 8) ^ (row & 7)) * CHUNK
            valid = cutlass.select_(row < tile.heads, Int32(4), Int32(0))
            op.copy_4_async(at, start + row_bytes * row + word * 4, valid)


@cute.jit
def leave_columns(
    results: cutlass.Constexpr, shared: Int32, rO: cute.Tensor, thread: Int32, half: Int32, part: cutlass.Constexpr
):
    """A warpgroup's ``part`` columns of the result into shared memory."""
    sO = result_tensors(results, shared)[0]
    row, column = first_row(thread), half * part + (thread & 3) * 2
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(part // 4):
            sO[0, row + 8 * r, column + (i // 2 * 8 + i % 2)] = rO[i // 2 * 4 + 2 * r + i % 2]


@cute.jit
def leave_sums(results: cutlass.Constexpr, shared: Int32, rMax: cute.Tensor, rSum: cute.Tensor, thread: Int32):
    """Maxima and sums of the rows into shared memory."""
    sStat, row = result_tensors(results, shared)[1], first_row(thread)
    for r in cutlass.range_constexpr(2):
        row_sum = lanes_sum(rSum[r])
        if (thread & 3) == 0:
            sStat[0, row + 8 * r, 0] = rMax[r]
            sStat[0, row + 8 * r, 1] = row_sum
