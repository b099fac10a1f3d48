"""Blocks of E2M1 numbers in registers: quantised and read back, bit for bit as ``formats/`` defines them.

    Quantizer: a block's numbers -> amax -> scale, its reciprocal -> eight codes a word, scale byte
    Reader: scale byte -> the numbers of codes 0 to 7, rounded -> table of bytes -> looked up four codes at a time

The arithmetic of one value is ``cuda/fp4.py``. Loads and stores are the caller's: a quantiser, a cache write or an
epilogue.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.formats.nvfp4 import GLOBAL_SCALE_MAX

from . import e4m3, fp4
from .fp4 import permute_bytes
from .warp_ops import fma, pack

_LEAST = 2.0**-100  # of a global scale under which no quotient or remainder leaves the normal numbers


def floats_of(vectors: list[Any]) -> tuple[list[Any], list[Any]]:
    """The numbers of vectors in registers as Float32; those of 16 bits, two or more a vector, as pairs besides."""
    dtype, width = vectors[0].element_type, cute.size(vectors[0])
    if dtype is Float32 or width == 1:
        return [vector[e].to(Float32) for vector in vectors for e in range(width)], []
    words = [cute.recast_tensor(vector, Int32) for vector in vectors]
    pairs = [word[i] for word in words for i in range(width // 2)]
    return [number for pair in pairs for number in fp4.floats(dtype, pair)], pairs


@cute.jit
def amax_of(x: list[Any], pairs: list[Any], dtype: Any, lanes: int):
    """The largest magnitude of a block, NaN skipped, and whether none of this thread's numbers is NaN.

    The block lies in ``lanes`` neighbouring threads of a warp, a power of two; if they are several, all threads of the
    warp must call. ``pairs`` are the numbers x once more, as pairs of ``dtype``, or none.
    """
    if const_expr(len(pairs) > 0):
        top = fp4.amax_or_nan_of_pairs(dtype, pairs)
    else:
        top = fp4.amax_or_nan(x)
    whole = top == top
    if not whole:
        top = fp4.amax(x)
    if const_expr(lanes > 1):
        top = cute.arch.warp_reduction(top, cute.arch.fmax, threads_in_group=lanes)
    return top, whole


class Quantizer:
    """``format`` is nvfp4 or mxfp4, ``floor`` rounds the scale of MXFP4 down. A block lies in ``lanes`` threads, as
    ``amax_of`` has it."""

    def __init__(self, format: str, floor: bool = False, lanes: int = 1):
        self.nvfp4, self.floor, self.lanes = format == "nvfp4", floor, lanes

    @cute.jit
    def __call__(self, x: list[Any], pairs: list[Any], dtype: Any, gs: Any):
        """The codes of a thread's numbers, eight a word, and the scale byte of their block.

        ``gs`` is the global scale or None, which is 1; the other arguments are those of ``amax_of``.
        """
        top, whole = amax_of(x, pairs, dtype, self.lanes)
        if const_expr(self.nvfp4):
            byte, scale = e4m3.nvfp4_scale(top, gs)
            r = fp4.nvfp4_factor(scale, gs)
        else:
            byte, _ = fp4.mxfp4_scale(top, self.floor)
            r = fp4.ue8m0_reciprocal(byte)
        codes = cute.make_rmem_tensor(len(x) // 8, Int32)
        # Nearly every block is bounded, unless the scale is rounded down. Nothing is lost to the others but time.
        if const_expr(self.floor):
            self.encode(codes, x, r, False)
        else:
            if whole and fp4.times(top, r) < Float32(7):
                self.encode(codes, x, r, True)
            else:
                self.encode(codes, x, r, False)
        return codes, byte

    def encode(self, codes: Any, x: list[Any], r: Any, bounded: bool) -> None:
        for i in range(len(x) // 8):
            codes[i] = fp4.e2m1_codes(x[8 * i : 8 * i + 8], r, bounded)


class Reader:
    """The numbers of codes under one scale, in ``dtype``.

    They are only eight and their negatives: they are worked out and rounded before any code is looked at, and a byte
    permutation finds one byte of four of them in one instruction. Of the quotients by global_scale two are divisions,
    of 1/2 and of 3/2 scales; the others are these times powers of two, exact since the smallest is normal.
    """

    def __init__(self, format: str, dtype: Any):
        self.nvfp4, self.dtype = format == "nvfp4", dtype

    def divisor(self, gs: Float32) -> tuple[Any, Any, Any]:
        """What ``values`` takes for the global scale ``gs``: worked out once a thread."""
        return gs, fp4.divide(Float32(1), gs), (gs >= _LEAST) & (gs <= GLOBAL_SCALE_MAX)

    def values(self, groups: list[Any], byte: Int32, gs: Any) -> list[Any]:
        """Of each group of eight codes its numbers, as words of 16-bit pairs or of float32; ``gs``: a ``divisor``."""
        planes = self.planes(self.magnitudes(byte, gs))
        negative = Int32(0)
        if self.nvfp4:
            one = -(1 << 31) if self.dtype is Float32 else -(1 << 31) | 0x8000
            negative = Int32(cutlass.select_(byte >= 128, Int32(one), Int32(0)))
        found = []
        for four in (codes >> (16 * half) for codes in groups for half in range(2)):
            looked = [permute_bytes(low, high, four & 0x7777) for low, high in planes]
            if len(looked) == 2:
                words = [permute_bytes(looked[0], looked[1], Int32(s)) for s in (0x5140, 0x7362)]
                signs = [(codes << 12 & 0x8000) | (codes << 24 & -(1 << 31)) for codes in (four, four >> 8)]
            else:
                both = [[permute_bytes(*looked[i : i + 2], Int32(s)) for i in (0, 2)] for s in (0x5140, 0x7362)]
                words = [permute_bytes(*pair, Int32(s)) for pair in both for s in (0x5410, 0x7632)]
                signs = [four << (28 - 4 * i) & -(1 << 31) for i in range(4)]
            found += [word ^ sign ^ negative for word, sign in zip(words, signs, strict=True)]
        return found

    def magnitudes(self, byte: Int32, gs: Any) -> list[Any]:
        """The numbers of codes 0 to 7, without the sign that an E4M3 scale may have."""
        scale = e4m3.values(byte & 0x7F)[0] if self.nvfp4 else fp4.ue8m0_value(byte)
        if gs is None:
            return [fp4.times(scale, Float32(m)) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
        half, three = (self.quotient(fp4.times(scale, Float32(m)), *gs) for m in (0.5, 1.5))
        by = lambda x, *powers: [fp4.times(x, Float32(p)) for p in powers]
        one, two, four = by(half, 2.0, 4.0, 8.0)
        six, twelve = by(three, 2.0, 4.0)
        return [fp4.times(scale, Float32(0)), half, one, three, two, six, four, twelve]

    @cute.jit
    def quotient(self, x: Float32, gs: Float32, inverse: Float32, ordinary: Any):
        """x / gs, correctly rounded. ``inverse`` is 1 / gs, so that the second of two corrections rounds as the
        quotient does (Markstein, 1990) where nothing leaves the range of normal numbers: ``ordinary`` says so."""
        q = fp4.times(x, inverse)
        if ordinary:
            for _ in cutlass.range_constexpr(2):
                q = fma(fma(-q, gs, x), inverse, q)
        else:
            q = fp4.divide(x, gs)
        return q

    def planes(self, values: list[Any]) -> list[tuple[Int32, Int32]]:
        """Byte i of all eight numbers, for every i, after rounding them to the dtype."""
        if self.dtype is Float32:
            bits = [x.bitcast(Int32) for x in values]
            planes = []
            for low, high in ((0x5140, 0x5410), (0x5140, 0x7632), (0x7362, 0x5410), (0x7362, 0x7632)):
                quads = []
                for q in (0, 4):
                    first, second = (permute_bytes(bits[q + i], bits[q + i + 1], Int32(low)) for i in (0, 2))
                    quads.append(permute_bytes(first, second, Int32(high)))
                planes.append((quads[0], quads[1]))
            return planes
        pairs = [pack(self.dtype, values[i], values[i + 1]) for i in range(0, 8, 2)]
        return [
            (permute_bytes(pairs[0], pairs[1], Int32(s)), permute_bytes(pairs[2], pairs[3], Int32(s)))
            for s in (0x6420, 0x7531)
        ]
