"""Scores: sqrt(softplus(x)), and floats as integers of the same order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.log1p import log1p_ratio
from torch_attnkit.cuda.warp_ops import LOG2_E, exp2, fma

NONE = -(2**31)  # below every key: a missing expert, or one that has been chosen
LAST = 2**31 - 1
TINY = 1e-20  # added to a sum that weights are divided by: nothing but zeros stay zeros
_LN_2 = 0.693147182464599609375  # float32, and the rest of it
_LN_2_REST = -1.904654299957767e-09
_FLAT = 88.0  # e^-x counts for nothing from a little below here on, and is normal up to it
_FAR = -17.0  # below it sqrt(log(1 + e^x)) is e^(x/2), but for 1e-8 of it
_NOTHING = -104.0  # below it e^x is 0 in float32, and so is the score


def sqrt(y: Float32) -> Float32:
    """The root of a normal number that is not negative, within a rounding."""
    r = cute.math.rsqrt(y, fastmath=True)
    root = y * r
    return fma(fma(-root, root, y), r * 0.5, root)


def sqrt_softplus(x: Float32) -> Float32:
    """sqrt(log(1 + e^x)) to about two roundings for every x, 0 below -104.

    log(1 + e^-|x|) + max(x, 0), of which the sum rounds once; where x is far below 0, e^(x/2), since e^x has fewer bits
    from -87 down. What rounding the exponent times log2(e) costs, times it in the power, is put back afterwards.
    """
    far = x < _FAR
    a = cute.arch.fmin(cutlass.select_(far, x * Float32(-0.5), cute.math.absf(x)), Float32(_FLAT))
    power = a * Float32(-LOG2_E)
    lost = fma(power, Float32(-_LN_2_REST), fma(power, Float32(-_LN_2), -a))
    e = exp2(power)
    e = fma(e, lost, e)
    root = sqrt(fma(e, log1p_ratio(e), cute.arch.fmax(x, Float32(0))))
    return Float32(cutlass.select_(far, cutlass.select_(x < _NOTHING, Float32(0), e), root))


def ordered(x: Float32) -> Int32:
    """An integer that compares as the number does: above ``NONE`` for all but NaN, and the same for 0 and -0."""
    bits = Float32(x + Float32(0)).bitcast(Int32)
    return Int32(bits ^ ((bits >> 31) & LAST))


def number(key: Int32) -> Float32:
    """The number of which ``key`` is the order."""
    return Int32(key ^ ((key >> 31) & LAST)).bitcast(Float32)


def largest(key: Int32) -> Int32:
    """The largest of a warp, in every lane."""
    return cute.arch.warp_redux_sync(key, "max")


def trailing_zeros(bits: Int32) -> Int32:
    """Index of the lowest set bit, or 32."""
    return cute.arch.popc(~bits & (bits - 1))
