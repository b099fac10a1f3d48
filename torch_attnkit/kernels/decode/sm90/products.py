"""What the ``wgmma`` kernels of Hopper have in common: a group's query heads are the 64 rows of both products.

Operands lie in shared memory as rows of 128 bytes, in blocks of columns, with their 16-byte chunks swizzled (128B), as
``wgmma`` reads them. Of an accumulator a lane has two rows, 8 apart, and of every 8 columns two neighbours; so scores
are at ``[i // 4 * 8 + i % 2]`` from the lane's first column on.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import tanh

from ..arguments import Scalars, Tensors
from ..combine import result_tensors
from ..schedule import WorkTile
from .config import HEADS, ROW_BYTES, Ring

_INF = float("inf")


def keys_by_columns(ring: Ring, address: Int32) -> cute.Tensor:
    """The ring as the right side of the first product: (N, part, stages * halves)."""
    return staged(ring.dtype, address, (ring.keys, ring.part, ring.stages * ring.halves))


def columns_by_keys(ring: Ring, sKV: cute.Tensor) -> cute.Tensor:
    """The same as the right side of the second: (part, N, stages * halves)."""
    shape = (ring.part, ring.keys, ring.stages * ring.halves)
    return cute.composition(sKV, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def staged(dtype: Any, address: Int32, shape: tuple[int, int, int]) -> cute.Tensor:
    """Rows of columns, a number of times, as ``wgmma`` reads them."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, shape[1])
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, dtype), shape, order=(0, 1, 2))
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, clear: bool) -> None:
    """Issue ``acc (+)= a b`` as one group of ``wgmma``, without waiting for it."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not clear)
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


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


def first_row(thread: Int32) -> Int32:
    """The first of the two rows of an accumulator that a lane has; the other is 8 below it."""
    return thread // 32 * 16 + (thread & 31) // 4


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


def lanes_sum(value: Float32) -> Float32:
    """Over the four lanes that have a row."""
    for distance in (1, 2):
        value += cute.arch.shuffle_sync_bfly(value, offset=distance)
    return value
