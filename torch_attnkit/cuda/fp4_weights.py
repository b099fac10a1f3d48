"""FP4 weights as operands of a product: words of eight E2M1 codes to pairs of bf16, and their scales.

A word's codes i and i + 4 stand 16 bits apart, so a mask takes both at once, and one integer product moves the sign to
the top of its half and the other three bits to the exponent's end: the bf16 of these bits is the number times 2^-126,
exact, subnormals included. One multiplication by a factor, the scale times a power of two, then gives the weight times
2^-LOWERED, which the epilogue takes back: NVFP4 weights have six significant bits, MXFP4 weights two. Factors of MXFP4
stand for scales of 2^-69 (smaller ones lose bits) to 2^64 (larger ones become infinite).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from . import e4m3
from .asm import asm
from .fp4 import floats, permute_bytes
from .limits import traced
from .warp_ops import pack

LOWERED = {"nvfp4": 8, "mxfp4": 63}  # powers of two by which decoded weights are too small
_TWO_TO_118, _TWO_TO_63 = 0x7A807A80, 0x5F005F00
_CODES = 0x81C081C0  # sign and exponent bits of two bf16
_MINUS_ZERO = 0x80008000
_LOW, _HIGH = (0x000F000F, 0x1040), (0x00F000F0, 0x104)  # codes, and what moves them there


def _multiply(a: Uint32, b: Uint32) -> Uint32:
    """Two products of bf16, rounded to nearest. The instruction came with sm_90, as clusters did; a sum with -0 is the
    same."""
    return _product(a, b) if traced().clusters else _multiply_add(a, b, Uint32(_MINUS_ZERO))


@dsl_user_op
def _product(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    return asm(Uint32, [a, b], "mul.rn.bf16x2 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def _multiply_add(a: Uint32, b: Uint32, c: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two sums a * b + c of bf16, each rounded to nearest once."""
    return asm(Uint32, [a, b, c], "fma.rn.bf16x2 $0, $1, $2, $3;", loc=loc, ip=ip)


def decode(word: Uint32, factor: Uint32) -> list[Uint32]:
    """Codes 0 .. 7 of a word to bf16 pairs (0, 4), (1, 5), (2, 6), (3, 7); ``factor`` stands in both halves."""
    pairs = []
    for half in (word, word >> 8):
        for mask, move in (_LOW, _HIGH):
            pairs.append(_multiply(((half & mask) * move) & Uint32(_CODES), factor))
    return pairs


def _halves_of_e4m3(word: Uint32) -> tuple[Any, Any]:
    """Four E4M3 numbers as pairs of float16, exactly."""
    if traced().e4m3:
        return _converted(word)
    return e4m3.f16_pair(Int32(word)), e4m3.f16_pair(Int32(word >> 16))


@dsl_user_op
def _converted(word: Uint32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, Uint32]:
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    return asm([Uint32, Uint32], [word], text, loc=loc, ip=ip)


def factors_of_e4m3(word: Uint32) -> list[Uint32]:
    """Four E4M3 scales to bf16 factors of NVFP4, two a word; NaN stays NaN."""
    pairs = (pack(cutlass.BFloat16, *floats(cutlass.Float16, Int32(pair))) for pair in _halves_of_e4m3(word))
    return [_multiply(Uint32(pair), Uint32(_TWO_TO_118)) for pair in pairs]


def factors_of_e8m0(word: Uint32) -> list[Uint32]:
    """Four E8M0 scales, 2^(byte - 127), to bf16 factors of MXFP4, two a word; 255 is NaN.

    As the exponent of a bf16 a byte is that number already, but 0, which is zero (its products with weights would be,
    too), and 255, an infinity: zero times that is NaN."""
    factors = []
    for bytes_ in (0x4140, 0x4342):  # of the word, each with one of zero above it
        values = Uint32(permute_bytes(Int32(word), Int32(0), Int32(bytes_))) * 0x80
        nan = _multiply(values, Uint32(0))
        factors.append(_multiply_add(values, Uint32(_TWO_TO_63), nan))
    return factors


def both(half: Uint32) -> Uint32:
    """A factor in both halves of a word."""
    return half * 0x10001


def both_of_two(word: Uint32) -> tuple[Uint32, Uint32]:
    """The same of both factors of a word."""
    low, high = (Uint32(permute_bytes(Int32(word), Int32(word), Int32(bytes_))) for bytes_ in (0x1010, 0x3232))
    return low, high
