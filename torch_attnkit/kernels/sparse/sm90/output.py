"""Where results go: outputs, their logarithmic sums, and the sums of those that are not normalised."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.smem import itemsize
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2

from .arguments import Numbers, Tensors
from .schedule import WorkTile


def inverse(row_sum: Float32, denominator: Float32) -> Float32:
    """Of a denominator, and 0 of a row's that has no keys."""
    return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))


@cute.jit
def factor_of(tensors: Tensors, numbers: Numbers, head: Int32, row_max: Float32, row_sum: Float32):
    """Of a numerator: 1 where it is the result, else what the sum, to which the sink belongs, divides by."""
    return factor_beside(numbers, sink_of(tensors, numbers, head), row_max, row_sum)


@cute.jit
def sink_of(tensors: Tensors, numbers: Numbers, head: Int32):
    """A head's sink, if there is one: loaded long before it is added, where time counts."""
    sink = Float32(0.0)
    if numbers.has_sink != 0:
        sink = tensors.sink[head]
    return sink


@cute.jit
def factor_beside(numbers: Numbers, sink: Float32, row_max: Float32, row_sum: Float32):
    """What ``factor_of`` is, of a sink that is known."""
    denominator = row_sum
    if numbers.has_sink != 0:
        denominator += exp2(sink * LOG2_E - finite(row_max))
    return cutlass.select_(numbers.normalize != 0, inverse(row_sum, denominator), Float32(1.0))


class Output:
    """The results of heads as numbers; ``dtype`` is the call's. ``run``: how many neighbouring columns a lane has."""

    run = 8

    def __init__(self, dtype: Any):
        self.dtype = dtype

    @cute.jit
    def store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, column: cutlass.Constexpr,
        words: list[Int32],
    ):  # fmt: skip
        """Of a head, where it is ``there``, four lanes' columns from ``column`` on: this lane's ``run``."""
        head = tile.head + cutlass.min(row, tile.heads - 1)
        to = self._address(tensors, tile.token, head, column + (cute.arch.lane_idx() & 3) * 8)
        if there:
            copies.store_words(to, words)

    @cute.jit
    def store_chunk(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, chunk: Int32, words: list[Int32]
    ):
        """The same of eight columns, chunk number ``chunk``."""
        if there:
            copies.store_words(self._address(tensors, tile.token, tile.head + row, chunk * 8), words)

    def _address(self, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        out = tensors.results.out
        offset = Int64(out.stride[0]) * token + Int64(out.stride[1]) * head + column
        return out.iterator.toint() + offset * itemsize(self.dtype)

    @cute.jit
    def store_stats(
        self, tensors: Tensors, numbers: Numbers, token: Int32, head: Int32, row_max: Float32, row_sum: Float32
    ):
        tensors.results.lse[token, head] = (row_max + op.log2(row_sum)) * LN_2
        if numbers.normalize == 0:
            tensors.results.row_sum[token, head] = row_sum
