"""Conversions of E4M3 on every architecture: instructions from sm_89 on, before it bit for bit what those give."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from . import fp4
from .asm import asm
from .limits import traced
from .warp_ops import pack_e4m3

_MAX, _NAN = 448.0, 0x7F
_LEAST_NORMAL = 2.0**-6
# 2^14, whose neighbours are 2^-9 apart, as numbers below 2^-6 are: added, it rounds to them, which its last bits count.
_STEPS, _STEPS_BITS = 16384.0, 0x46800000
_REBIAS = 120 << 3  # of the exponents of float32 and E4M3, above a mantissa of three bits
_INFINITY = 0x7F800000
_256 = 0x5C005C00  # two of float16


def pair(low: Float32, high: Float32) -> Int32:
    """``fp4.e4m3_pair``: two numbers as bytes, ``low`` in bits 0..7."""
    return fp4.e4m3_pair(low, high) if traced().e4m3 else code(low) | (code(high) << 8)


def pack(four: list[Float32]) -> Int32:
    """``warp_ops.pack_e4m3``: four numbers as bytes."""
    return pack_e4m3(four) if traced().e4m3 else pair(*four[:2]) | (pair(*four[2:]) << 16)


def values(both: Int32) -> tuple[Float32, ...]:
    """``fp4.e4m3_values``: the numbers of the bytes in bits 0..7 and 8..15."""
    return fp4.e4m3_values(both) if traced().e4m3 else fp4.floats(cutlass.Float16, f16_pair(both))


def nvfp4_scale(top: Float32, global_scale: Any = None) -> tuple[Int32, Float32]:
    """``fp4.nvfp4_scale``: the scale of a block of 16 whose largest magnitude is ``top``."""
    if traced().e4m3:
        return fp4.nvfp4_scale(top, global_scale)
    sixth = fp4.divide(top, Float32(fp4.E2M1_MAX))
    byte = code(sixth if global_scale is None else fp4.times(sixth, global_scale))
    return byte, values(byte)[0]


def code(x: Float32) -> Int32:
    """A number as an E4M3 byte: to nearest, ties to even, at most 448; NaN is 0x7f."""
    bits = Float32(x).bitcast(Int32)
    size = bits & 0x7FFFFFFF
    top = cute.arch.fmin(Int32(size).bitcast(Float32), Float32(_MAX))
    kept = top.bitcast(Int32)
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - _REBIAS
    small = (top + Float32(_STEPS)).bitcast(Int32) - _STEPS_BITS
    found = cutlass.select_(top < Float32(_LEAST_NORMAL), small, normal) | ((bits >> 24) & 0x80)
    return Int32(cutlass.select_(size > _INFINITY, Int32(_NAN), found))


def f16_pair(both: Int32) -> Int32:
    """The E4M3 bytes in bits 0..7 and 8..15 as two float16, exactly; 0x7f and 0xff are NaN.

    Four bits of exponent are float16's with a bias that is eight less: the number is 2^8 times what these bits are.
    """
    apart = (both & 0xFF) | ((both & 0xFF00) << 8)
    size = apart & 0x7F007F
    nan = (((size + 0x10001) & 0x800080) >> 7) * 0x7FFF
    return _times((size << 7) | ((apart & 0x800080) << 8), Int32(_256)) | nan


@dsl_user_op
def _times(a: Int32, b: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Products of two pairs of float16."""
    return asm(Int32, [Int32(a), Int32(b)], "mul.rn.f16x2 $0, $1, $2;", loc=loc, ip=ip)
