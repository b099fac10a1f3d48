"""FP4 weights as operands of a product: words of eight E2M1 codes to pairs of bf16, and their scales. Imports cutlass.

A word's codes i and i + 4 stand 16 bits apart, so a mask takes both at once, and one integer product moves the sign to
the top of its half and the other three bits to the exponent's end: the bf16 of these bits is the number times 2^-126,
exact, subnormals included. One multiplication by a factor, the scale times a power of two, then gives the weight times
2^-LOWERED, which the epilogue takes back: NVFP4 weights have six significant bits, MXFP4 weights two. Factors of MXFP4
stand for scales of 2^-69 (smaller ones lose bits) to 2^64 (larger ones become infinite).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Uint32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm

LOWERED = {"nvfp4": 8, "mxfp4": 63}  # powers of two by which decoded weights are too small
_CODES = 0x81C081C0  # sign and exponent bits of two bf16
_LOW, _HIGH = (0x000F000F, 0x1040), (0x00F000F0, 0x104)  # codes, and what moves them there
_TWO_TO_119 = 0x7B007B00


@dsl_user_op
def _multiply(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two products of bf16, rounded to nearest."""
    (pair,) = asm([Uint32], [a, b], "mul.rn.bf16x2 $0, $1, $2;", loc=loc, ip=ip)
    return pair


def decode(word: Uint32, factor: Uint32) -> list[Uint32]:
    """Codes 0 .. 7 of a word to bf16 pairs (0, 4), (1, 5), (2, 6), (3, 7); ``factor`` stands in both halves."""
    pairs = []
    for half in (word, word >> 8):
        for mask, move in (_LOW, _HIGH):
            pairs.append(_multiply(((half & mask) * move) & Uint32(_CODES), factor))
    return pairs


def factors_of_e4m3(word: Uint32) -> list[Uint32]:
    """Four E4M3 scales to bf16 factors of NVFP4, two a word; NaN stays NaN.

    A scale's bits, four to the left, are those of the bf16 that is 2^-120 times as large.
    """
    factors = []
    for shift in (0, 16):
        two = (word >> shift) & 0xFFFF
        two = (two | (two << 8)) & 0x00FF00FF
        bits = ((two & 0x007F007F) << 4) | ((two & 0x00800080) << 8)
        raised = _multiply(_multiply(bits, Uint32(_TWO_TO_119)), Uint32(_TWO_TO_119))
        nan = ((two & 0x007F007F) + 0x00010001) & 0x00800080
        factors.append(raised | (nan * 0xFF))
    return factors


def factors_of_e8m0(word: Uint32) -> list[Uint32]:
    """Four E8M0 scales, 2^(byte - 127), to bf16 factors of MXFP4, two a word; 255 is NaN."""
    factors = []
    for shift in (0, 16):
        halves = []
        for more in (0, 8):
            byte = (word >> (shift + more)) & 0xFF
            field = byte + 63
            field = cutlass.select_(field > 255, Uint32(255), field)
            halves.append((field << 7) | ((byte + 1) >> 8))
        factors.append(halves[0] | (halves[1] << 16))
    return factors


def both(half: Uint32) -> Uint32:
    """A factor in both halves of a word."""
    return half * 0x10001
