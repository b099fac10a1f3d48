"""Joining partial results of attention: maxima in powers of two, sums and numerators. Imports cutlass."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .warp_ops import exp2


def finite(top: Float32) -> Float32:
    """A maximum to subtract: 0 for one that is -inf, which would make nan of -inf."""
    return cutlass.select_(top == -Float32.inf, Float32(0.0), top)


def join(
    rO: cute.Tensor, top: Float32, total: Float32, tops: list[Float32], totals: list[Float32], news: list
) -> tuple[Float32, Float32]:
    """Adds parts to a numerator ``rO`` of 4 columns, whose maximum is ``top`` and sum ``total``; returns both anew.

    A part has its maximum, -inf if it has no keys, its sum and its 4 columns.
    """
    old = top
    for new in tops:
        top = cute.arch.fmax(top, new)
    weight = exp2(old - finite(top))
    total = total * weight
    for x in range(4):
        rO[x] = rO[x] * weight
    for new, part, columns in zip(tops, totals, news, strict=True):
        weight = exp2(new - finite(top))
        total += weight * part
        for x in range(4):
            # What stands in for a part without keys may be a copy of another one, and infinite.
            rO[x] = rO[x] + weight * cutlass.select_(new == -Float32.inf, Float32(0.0), columns[x])
    return top, total
