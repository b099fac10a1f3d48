"""Where results go: outputs, their logarithmic sums, and the sums of those that are not normalised. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2
from torch_attnkit.kernels.decode.config import itemsize

from .arguments import Numbers, Tensors


def inverse(row_sum: Float32, denominator: Float32) -> Float32:
    """Of a denominator, and 0 of a row's that has no keys."""
    return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))


class Output:
    """The results of heads; ``dtype`` is the call's."""

    def __init__(self, dtype: Any):
        self.dtype = dtype

    @cute.jit
    def factor(self, tensors: Tensors, numbers: Numbers, head: Int32, row_max: Float32, row_sum: Float32):
        """Of a numerator: 1 where it is the result, else what the sum, to which the sink belongs, divides by."""
        denominator = row_sum
        if numbers.has_sink != 0:
            denominator += exp2(tensors.sink[head] * LOG2_E - finite(row_max))
        return cutlass.select_(numbers.normalize != 0, inverse(row_sum, denominator), Float32(1.0))

    def address(self, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        offset = Int64(tensors.out.stride[0]) * token + Int64(tensors.out.stride[1]) * head + column
        return tensors.out.iterator.toint() + offset * itemsize(self.dtype)

    @cute.jit
    def store_stats(
        self, tensors: Tensors, numbers: Numbers, token: Int32, head: Int32, row_max: Float32, row_sum: Float32
    ):
        tensors.lse[token, head] = (row_max + op.log2(row_sum)) * LN_2
        if numbers.normalize == 0:
            tensors.row_sum[token, head] = row_sum
