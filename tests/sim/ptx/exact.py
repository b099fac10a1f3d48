"""Floating-point results by exact rational arithmetic: what the instruction tests compare with.

A format is (exponent bits, mantissa bits); codes are integers. Nothing here is shared with the simulator.
"""

from __future__ import annotations

from fractions import Fraction

F16, BF16, F32, F64 = (5, 10), (8, 7), (8, 23), (11, 52)
WIDTH = {F16: 16, BF16: 16, F32: 32, F64: 64}
Format = tuple[int, int]


def infinity(f: Format) -> int:
    return ((1 << f[0]) - 1) << f[1]


def sign_bit(f: Format) -> int:
    return 1 << (f[0] + f[1])


def is_nan(f: Format, code: int) -> bool:
    return code & (sign_bit(f) - 1) > infinity(f)


def is_inf(f: Format, code: int) -> bool:
    return code & (sign_bit(f) - 1) == infinity(f)


def is_negative(f: Format, code: int) -> bool:
    return bool(code & sign_bit(f))


def value(f: Format, code: int) -> Fraction:
    """The rational value of a finite code."""
    magnitude = code & (sign_bit(f) - 1)
    exponent, mantissa = magnitude >> f[1], magnitude & ((1 << f[1]) - 1)
    bias = (1 << (f[0] - 1)) - 1
    scale = Fraction(2) ** (max(exponent, 1) - bias - f[1])
    v = (mantissa + ((1 << f[1]) if exponent else 0)) * scale
    return -v if is_negative(f, code) else v


def rounded(f: Format, x: Fraction, mode: str = "rn", negative_zero: bool = False) -> int:
    """The code of a rational number: mode rn, rz, rm or rp; ``negative_zero`` is the sign of an exact zero."""
    negative = x < 0 or (x == 0 and negative_zero)
    a = abs(x)
    sign = sign_bit(f) if negative else 0
    if a == 0:
        return sign
    bias = (1 << (f[0] - 1)) - 1
    exponent = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** exponent > a:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, 1 - bias) - f[1])
    steps, rest = divmod(a, unit)
    steps = int(steps)
    up = {"rn": rest > unit / 2 or (rest == unit / 2 and steps % 2 == 1), "rz": False}.get(
        mode, rest > 0 and (mode == "rp") != negative
    )
    steps += up
    code = steps + (max(exponent + bias, 1) - 1 << f[1])
    largest = infinity(f) - 1
    if code <= largest:
        return sign | code
    to_infinity = mode == "rn" or (mode == "rp" and not negative) or (mode == "rm" and negative)
    return sign | (infinity(f) if to_infinity else largest)


def flushed(f: Format, code: int) -> int:
    """Subnormals as zeros of their sign."""
    return code & sign_bit(f) if code & (sign_bit(f) - 1) < 1 << f[1] else code


def add(f: Format, a: int, b: int, mode: str = "rn", to: Format | None = None) -> int | None:
    """a + b; None for NaN."""
    return fma(f, a, rounded(f, Fraction(1)), b, mode, to)


def fma(f: Format, a: int, b: int, c: int, mode: str = "rn", to: Format | None = None) -> int | None:
    """a * b + c in one rounding; None for NaN. ``to``: the format of the result."""
    to = to or f
    if any(is_nan(f, v) for v in (a, b, c)):
        return None
    negative = is_negative(f, a) != is_negative(f, b)
    if is_inf(f, a) or is_inf(f, b):
        other = b if is_inf(f, a) else a
        if other & (sign_bit(f) - 1) == 0 or (is_inf(f, c) and is_negative(f, c) != negative):
            return None
        return infinity(to) | (sign_bit(to) if negative else 0)
    if is_inf(f, c):
        return infinity(to) | (sign_bit(to) if is_negative(f, c) else 0)
    product, total = value(f, a) * value(f, b), value(f, a) * value(f, b) + value(f, c)
    minus = negative if negative == is_negative(f, c) and product == 0 == value(f, c) else mode == "rm"
    return rounded(to, total, mode, minus)


def mul(f: Format, a: int, b: int, mode: str = "rn") -> int | None:
    if is_nan(f, a) or is_nan(f, b):
        return None
    negative = is_negative(f, a) != is_negative(f, b)
    if is_inf(f, a) or is_inf(f, b):
        other = b if is_inf(f, a) else a
        return None if other & (sign_bit(f) - 1) == 0 else infinity(f) | (sign_bit(f) if negative else 0)
    return rounded(f, value(f, a) * value(f, b), mode, negative)


def div(f: Format, a: int, b: int, mode: str = "rn") -> int | None:
    if is_nan(f, a) or is_nan(f, b):
        return None
    negative = is_negative(f, a) != is_negative(f, b)
    sign, zero_a, zero_b = sign_bit(f) if negative else 0, value_is_zero(f, a), value_is_zero(f, b)
    if is_inf(f, a) or zero_b:
        return None if is_inf(f, a) == is_inf(f, b) and (is_inf(f, a) or zero_a) else sign | infinity(f)
    if is_inf(f, b):
        return sign
    return rounded(f, value(f, a) / value(f, b), mode, negative)


def value_is_zero(f: Format, code: int) -> bool:
    return code & (sign_bit(f) - 1) == 0


def sqrt(f: Format, a: int, mode: str = "rn") -> int | None:
    if is_nan(f, a) or (is_negative(f, a) and not value_is_zero(f, a)):
        return None
    if value_is_zero(f, a) or is_inf(f, a):
        return a
    x, scale = value(f, a), 1 << 2400
    from math import isqrt

    root = Fraction(isqrt(x.numerator * x.denominator * scale * scale), x.denominator * scale)
    if root * root != x:  # a digit that no rounding mode can lose
        root += Fraction(1, 1 << 2300)
    return rounded(f, root, mode)
