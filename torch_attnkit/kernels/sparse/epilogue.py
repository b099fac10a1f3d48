"""What the epilogues of both architectures share: sinks and normalisation, and where results are stored, dense or
FP4."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import fp4, rope
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.smem import itemsize
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2
from torch_attnkit.formats.scale_layout import TILE_K, TILE_M
from torch_attnkit.kernels.fp4 import rows
from torch_attnkit.kernels.fp4.problem import BLOCK

from .arguments import Fp4Tensors, Scalars, Tensors

_TILE_BYTES = TILE_M * TILE_K  # of scales in the 128x4 layout
_ROWS = 32  # of a tile's, which follow one another 16 bytes apart


def inverse(row_sum: Float32, denominator: Float32) -> Float32:
    """1 / denominator, and 0 for rows without keys."""
    return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))


@cute.jit
def factor_of(tensors: Tensors, scalars: Scalars, head: Int32, row_max: Float32, row_sum: Float32):
    """Factor of O: 1 if the numerator is the result, else 1 / (row_sum + sink)."""
    return factor_beside(scalars, sink_of(tensors, scalars, head), row_max, row_sum)


@cute.jit
def sink_of(tensors: Tensors, scalars: Scalars, head: Int32):
    """A head's sink, or 0. Callers load it early, to hide the latency."""
    sink = Float32(0.0)
    if scalars.has_sink != 0:
        sink = tensors.sink[head]
    return sink


@cute.jit
def factor_beside(scalars: Scalars, sink: Float32, row_max: Float32, row_sum: Float32):
    """``factor_of`` with the sink already loaded."""
    denominator = row_sum
    if scalars.has_sink != 0:
        denominator += exp2(sink * LOG2_E - finite(row_max))
    return cutlass.select_(scalars.normalize != 0, inverse(row_sum, denominator), Float32(1.0))


class DenseStore:
    """16-bit results and their LSE; how a thread's columns are stored is an architecture's."""

    def __init__(self, dtype: Any):
        self.dtype = dtype

    def address(self, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        out = tensors.results.out
        offset = Int64(out.stride[0]) * token + Int64(out.stride[1]) * head + column
        return out.iterator.toint() + offset * itemsize(self.dtype)

    @cute.jit
    def store_stats(
        self, tensors: Tensors, scalars: Scalars, token: Int32, head: Int32, row_max: Float32, row_sum: Float32
    ):
        tensors.results.lse[token, head] = (row_max + op.log2(row_sum)) * LN_2
        if scalars.normalize == 0:
            tensors.results.row_sum[token, head] = row_sum


class Fp4Store:
    """Results in FP4: a lane has 8, 16 or 32 neighbouring columns of a head, a block or a part of one, as words of two
    values of ``dtype``; its neighbours have the block's other parts. ``fp4``: the fields of a problem's ``Fp4``. The
    bits are those of ``inverse_rope_fp4``. How blocks are quantised is an architecture's.

        words -> (RoPE channels: rotated back, rounded) -> amax over the lanes of a block -> scale byte, codes
    """

    def __init__(self, dtype: Any, dim: int, fp4: tuple[Any, ...]):
        self.dtype, self.dim = dtype, dim
        self.format, self.pairs, _, self.swizzled, self.divided = fp4
        self.block = BLOCK[self.format]
        self.kb = dim // self.block  # blocks of a head
        self.shift = self.block.bit_length() - 1  # columns to blocks
        self.still = dim - 2 * self.pairs  # columns before the rotated ones

    @cute.jit
    def unrotate(self, results: Fp4Tensors, token: Int32, column: Int32, words: list[Int32]):
        """Rotate the RoPE pairs from ``column`` on back."""
        rotated = []
        first = (column >> 1) - const_expr(self.still // 2)
        for i in cutlass.range_constexpr(len(words)):
            pair = cutlass.max(first + i, 0)
            cos, sin = (t[token, pair].to(Float32) for t in (results.cos, results.sin))
            new = op.pack(self.dtype, *rope.rotated_back(*fp4.floats(self.dtype, words[i]), cos, sin))
            rotated.append(cutlass.select_(first + i >= 0, new, words[i]))
        return rotated

    def global_scale(self, results: Fp4Tensors) -> Any:
        """Factor of values before quantisation, or None."""
        return results.global_scale[0] if self.divided else None

    def store_stats(self, *_: Any) -> None:
        """FP4 results have no LSE."""

    @cute.jit
    def store_scale(self, results: Fp4Tensors, like: cute.Tensor, token: Int32, head: Int32, block: Int32, byte: Int32):
        """Store the scale of a block of a head, and this token's share of the zero padding of the 128x4 layout. The
        first two axes of ``like`` are tokens and heads."""
        scale, (tokens, heads) = results.scale, (Int32(size) for size in like.shape[:2])
        first = scale.iterator.toint()
        if const_expr(not self.swizzled):
            _store_byte(first + (Int64(token) * heads + head) * self.kb + block, byte)
        else:
            each = Uint32(heads) // Uint32(Int32(scale.shape[0]))
            group = Int32(Uint32(head) // each)
            column = (head - group * Int32(each)) * self.kb + block
            padded, columns = Int32(scale.shape[1]), Int32(scale.shape[2])
            first += Int64(group) * padded * columns
            _store_byte(first + _in_tiles(token, column, columns), byte)
            for row in cutlass.range(token + tokens, padded, tokens, unroll=1):
                _store_byte(first + _in_tiles(row, column, columns), Int32(0))


def _in_tiles(row: Int32, column: Int32, columns: Int32) -> Int64:
    """Byte offset of a scale in the 128x4 layout."""
    row, column = Uint32(row), Uint32(column)
    tile = Int64(Int32(row // TILE_M)) * (columns // TILE_K) + Int32(column // TILE_K)
    inside = Int32(row % _ROWS) * 16 + Int32(row % TILE_M // _ROWS) * 4 + Int32(column % TILE_K)
    return tile * _TILE_BYTES + inside


def _store_byte(address: Int64, byte: Int32) -> None:
    rows.store_byte(byte, cute.make_ptr(cutlass.Uint8, address))
