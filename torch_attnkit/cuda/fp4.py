"""Block formats in the registers of one thread: NVFP4, MXFP4 and MXFP8, bit for bit as ``formats/`` defines them.

All functions take and give Float32, or bytes and codes in an Int32. A block is quantised in three steps:

    byte, scale = nvfp4_scale(amax(block), global_scale)     or mxfp4_scale, mxfp8_scale
    r = nvfp4_factor(scale, global_scale)                    or ue8m0_reciprocal(byte)
    e2m1_codes(block[i : i + 8], r)                          or e2m1_round(times(x, r)): the number read back

Every step is an IEEE operation rounded to nearest that keeps numbers below 2^-126, and none is fused with another,
which would skip a rounding. Needs what Hopper has: E4M3 has conversions there, E2M1 has none.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm, half
from .warp_ops import fma, max_or_nan

E2M1_MAX = 6.0
_ONE = 0x3F800000  # the bits of 1.0
_EXPONENT = 0x7F800000
# 1.5 * 2^23: a number up to 2^22 that is added to it is rounded to an integer, which is then in the sum's last bits.
_INTEGER = 12582912.0
_INTEGER_BITS = 0x4B400000
# From the exponent field of 1, 2 or 4, 1.5 * 2^22 times that number: added, it rounds to steps of 1/2, 1 or 2.
_STEPS = 6291456.0


@dsl_user_op
def times(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a * b, rounded; the assembler may not make a fused operation of it and a sum."""
    return asm(Float32, [Float32(a), Float32(b)], "mul.rn.f32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def divide(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a / b, correctly rounded. About 10 instructions."""
    return asm(Float32, [Float32(a), Float32(b)], "div.rn.f32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def magnitude(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """|x|."""
    return asm(Float32, [Float32(x)], "abs.f32 $0, $1;", loc=loc, ip=ip)


@dsl_user_op
def _append(digits: Int32, x: Float32, low: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """16 * digits + 8 * (whether the sign of x is set) + low."""
    text = "{ .reg .b32 t; shf.l.wrap.b32 t, $2, $1, 1; mad.lo.s32 $0, t, 8, $3; }"
    bits = Float32(x).bitcast(Int32)
    return asm(Int32, [Int32(digits), bits, Int32(low)], text, loc=loc, ip=ip)


@dsl_user_op
def e4m3_pair(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two numbers as E4M3 bytes, ``low`` in bits 0..7: to nearest, ties to even, at most 448; NaN is 0x7f."""
    text = "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }"
    return asm(Int32, [Float32(low), Float32(high)], text, loc=loc, ip=ip)


@dsl_user_op
def e4m3_values(pair: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """The numbers of the E4M3 bytes in bits 0..7 and 8..15. Exact; 0x7f and 0xff are NaN."""
    text = (
        "{ .reg .b16 t, low, high; .reg .b32 both; cvt.u16.u32 t, $2; cvt.rn.f16x2.e4m3x2 both, t; "
        "mov.b32 {low, high}, both; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
    return asm([Float32, Float32], [Int32(pair)], text, loc=loc, ip=ip)


@dsl_user_op
def _max_pairs(dtype: Any, top: Int32, pair: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The larger of ``top`` and the magnitudes of a pair of 16-bit floats, NaN where one is NaN."""
    kind = f"{half(dtype)}x2"
    text = f"{{ .reg .b32 t; abs.{kind} t, $2; max.NaN.{kind} $0, $1, t; }}"
    return asm(Int32, [Int32(top), Int32(pair)], text, loc=loc, ip=ip)


@dsl_user_op
def floats(dtype: Any, pair: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """A pair of BFloat16 or Float16 in float32. Of the former the upper is read in place, in one instruction."""
    if dtype is cutlass.BFloat16:
        text = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        text = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    return asm([Float32, Float32], [Int32(pair)], text, loc=loc, ip=ip)


def amax(values: list[Any]) -> Float32:
    """The largest magnitude. NaN is skipped; nothing but NaN gives 0."""
    top = Float32(0)
    for x in values:
        top = cute.arch.fmax(top, magnitude(x))
    return top


def amax_or_nan(values: list[Any]) -> Float32:
    """The largest magnitude, NaN if there is one."""
    top = Float32(0)
    for x in values:
        top = max_or_nan(top, magnitude(x))
    return top


def amax_or_nan_of_pairs(dtype: Any, pairs: list[Any]) -> Float32:
    """The same of pairs of BFloat16 or Float16, in half the instructions."""
    top = Int32(0)
    for pair in pairs:
        top = _max_pairs(dtype, top, pair)
    return max_or_nan(*floats(dtype, top))


def nvfp4_scale(top: Float32, global_scale: Any = None) -> tuple[Int32, Float32]:
    """e4m3(amax / 6 * global_scale) of a block of 16: its byte and its number. global_scale None is 1."""
    t = _sixth(top)
    byte = e4m3_pair(t if const_expr(global_scale is None) else times(t, global_scale), Float32(0))
    return byte, e4m3_values(byte)[0]


def _sixth(x: Float32) -> Float32:
    """x / 6, correctly rounded for x of 2^-122 and more, in three operations: a product with 1/6 is within one step,
    what it leaves of x is exact, and a sixth of that, added, rounds as the quotient does (Markstein, 1990). Below, any
    quotient is below 2^-124, and so is no scale under any global scale."""
    sixth = Float32(1 / 6)
    q = times(x, sixth)
    exact = fma(fma(q, Float32(-E2M1_MAX), x), sixth, q)
    return Float32(cutlass.select_(q == Float32.inf, q, exact))


def nvfp4_factor(scale: Float32, global_scale: Any = None) -> Float32:
    """global_scale / scale, what elements are multiplied by; 0 where the scale is 0."""
    one = Float32(1) if const_expr(global_scale is None) else global_scale
    return Float32(cutlass.select_(scale == 0, Float32(0), divide(one, scale)))


def nvfp4_value(element: Float32, scale: Float32, global_scale: Any = None) -> Float32:
    """element * scale / global_scale: the product of an E2M1 number is exact, the quotient rounded."""
    value = times(element, scale)
    return value if const_expr(global_scale is None) else divide(value, global_scale)


def mxfp4_scale(top: Float32, floor: bool = False) -> tuple[Int32, Float32]:
    """2^ceil(log2(amax / 6)) of a block of 32, or 2^(floor(log2 amax) - 2): its UE8M0 byte and its number."""
    return _ue8m0_scale(top, 0 if floor else 0x3FFFFF, 2)


def mxfp8_scale(top: Float32) -> tuple[Int32, Float32]:
    """2^ceil(log2(amax / 448)) of a block of 32 E4M3 numbers: its UE8M0 byte and its number."""
    return _ue8m0_scale(top, 0x1FFFFF, 8)


def _ue8m0_scale(top: Float32, carry: int, exponent: int) -> tuple[Int32, Float32]:
    """``carry`` is what a fraction above that of the largest element lacks to the next power of two, ``exponent`` its
    own. An infinity counts as 2^128, as its bits read; amax is no NaN."""
    byte = Int32(cutlass.max(((top.bitcast(Int32) + carry) >> 23) - exponent, Int32(0)))
    return byte, ue8m0_value(byte)


def ue8m0_value(byte: Int32) -> Float32:
    """2^(byte - 127), exact; 255 is NaN."""
    bits = cutlass.max(byte << 23, Int32(1 << 22))  # 2^-127 is no normal number
    bits = cutlass.select_(byte == 255, Int32(0x7FC00000), bits)
    return Int32(bits).bitcast(Float32)


def ue8m0_reciprocal(byte: Int32) -> Float32:
    """2^(127 - byte), exact, for bytes up to 253, which is all that a scale above gives."""
    return Int32((254 - byte) << 23).bitcast(Float32)


def e2m1_codes(values: list[Any], r: Float32, bounded: bool = False) -> Int32:
    """E2M1 codes of eight numbers times ``r``, the first in bits 0..3: to nearest, ties to even, at most 6; NaN is +6.

    With a = min(|x * r|, 6), the code is the least of 2 a, a + 2 and a / 2 + 4, each rounded to an integer: the three
    are the code's straight lines below 2, from 2 to 4 and from 4 on. NaN times r has no sign, in hardware.
    ``bounded`` says that there is no NaN and that all a are below 7 by themselves: an instruction less for each.
    """
    digits = Int32(0)
    for x in reversed(values):
        signed = x if bounded else times(x, r)
        a = times(magnitude(x), r) if bounded else cute.arch.fmin(magnitude(signed), Float32(E2M1_MAX))
        code = cute.arch.fmin(fma(a, Float32(2), Float32(_INTEGER)), fma(a, Float32(1), Float32(_INTEGER + 2)))
        code = cute.arch.fmin(code, fma(a, Float32(0.5), Float32(_INTEGER + 4)))
        digits = _append(digits, signed, code.bitcast(Int32))
    constant = _INTEGER_BITS * sum(16**i for i in range(len(values))) % (1 << 32)
    return digits - Int32(constant - (1 << 32) if constant >> 31 else constant)


def e2m1_round(y: Float32) -> Float32:
    """The E2M1 number nearest to y, ties to the even code, at most 6, with the sign of y; NaN is +6."""
    y = cute.arch.fmax(cute.arch.fmin(y, Float32(E2M1_MAX)), Float32(-E2M1_MAX))
    binade = Int32(cutlass.max(y.bitcast(Int32) & _EXPONENT, Int32(_ONE))).bitcast(Float32)  # 1, 2 or 4
    rounded = fma(-binade, Float32(_STEPS), fma(binade, Float32(_STEPS), y))
    return (rounded.bitcast(Int32) | (y.bitcast(Int32) & Int32(-(1 << 31)))).bitcast(Float32)


def e2m1_value(code: Int32) -> Float32:
    """The number of the E2M1 code in bits 0..3; other bits are ignored. Exact.

    Shifted to where a float has its exponent's last bits, it is the number times 2^-126, that of code 1 included.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return times(Int32(bits).bitcast(Float32), Float32(2.0**126))


@dsl_user_op
def permute_bytes(low: Int32, high: Int32, selector: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four of the eight bytes of (low, high): those whose numbers, 0 to 7, are the nibbles of the selector's low half,
    the first in its bits 0..3."""
    text = "prmt.b32 $0, $1, $2, $3;"
    return asm(Int32, [Int32(x) for x in (low, high, selector)], text, loc=loc, ip=ip)
