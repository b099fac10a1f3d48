"""Merging partial attention results: row maxima (log2), row sums and unnormalised outputs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .warp_ops import exp2


def finite(row_max: Float32) -> Float32:
    """The maximum to subtract: 0 for a row whose maximum is -inf, since -inf - -inf is NaN."""
    return cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)


def join(
    rO: cute.Tensor, row_max: Float32, row_sum: Float32, maxima: list[Float32], sums: list[Float32], columns: list
) -> tuple[Float32, Float32]:
    """Merge partial results into a numerator ``rO`` of 4 columns with its maximum and sum; returns the new maximum and
    sum.

    A partial result is a maximum (-inf without keys), a sum and 4 columns.
    """
    old = row_max
    for new in maxima:
        row_max = cute.arch.fmax(row_max, new)
    weight = exp2(old - finite(row_max))
    row_sum = row_sum * weight
    for x in range(4):
        rO[x] = rO[x] * weight
    for new, part, values in zip(maxima, sums, columns, strict=True):
        weight = exp2(new - finite(row_max))
        row_sum += weight * part
        for x in range(4):
            # What stands in for a partial result without keys may be a copy of another one, and infinite.
            rO[x] = rO[x] + weight * cutlass.select_(new == -Float32.inf, Float32(0.0), values[x])
    return row_max, row_sum
