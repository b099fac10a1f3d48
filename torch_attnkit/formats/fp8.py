"""The 8-bit floats: E4M3 elements and scales, UE8M0 scales, and E4M3 blocks under UE8M0 scales.

E4M3 here is the variant without infinities (OCP 8-bit Floating Point v1.0, `float8_e4m3fn`):
largest number 448, smallest 2^-9, NaN 0x7f and 0xff. UE8M0 (OCP Microscaling Formats v1.0, section
5.4.1) is an exponent alone: byte e is 2^(e - 127), 255 is NaN, and there is no zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .blocks import amax, check_axis, check_bytes, check_choice, check_float, check_scale, math_dtype, split

E4M3_MAX = 448.0
ROUNDINGS = ("ceil", "floor")
MXFP8_BLOCK = 32


def _exponent(a: Tensor) -> Tensor:
    """floor(log2(a)) of a normal a > 0 in float32 or float64, as an integer tensor.

    Zero and subnormal numbers give the exponent below that of the smallest normal number.
    """
    if a.dtype == torch.float64:
        return (a.view(torch.int64) >> 52) - 1023
    return (a.view(torch.int32) >> 23) - 127


def _pow2(k: Tensor, dtype: torch.dtype) -> Tensor:
    """2^k, built from its bits, for k of a normal number of `dtype` (float32 or float64)."""
    if dtype == torch.float64:
        return ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((k.to(torch.int32) + 127) << 23).view(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Floats (...) to E4M3 bytes (...).

    Round to nearest, ties to even, saturating at 448 (infinities too), subnormals kept, the sign of
    zero kept; NaN gives 0x7f whatever its sign. These are the results of `cvt.rn.satfinite.e4m3x2`.
    A float64 is rounded once, not through float32.

    Raises TypeError for a dtype that is not floating.
    """
    check_float("fp8.e4m3_encode", "x", x.dtype)
    x = x.to(math_dtype(x.dtype))
    a = x.abs().clamp(max=E4M3_MAX)
    exponent = _exponent(a).clamp(min=-6)  # Subnormals share the spacing of the lowest binade.
    # In units of the spacing 2^(exponent - 3) the significand is 8..16, or 0..8 below 2^-6; a carry
    # to 16 lands on the next exponent by itself.
    significand = torch.round(a * _pow2(3 - exponent, a.dtype)).to(torch.int32)
    byte = (exponent + 6) * 8 + significand + torch.signbit(x) * 128
    return torch.where(x.isnan(), 0x7F, byte).to(torch.uint8)


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 bytes (...) to their numbers in `dtype` (...). Exact; 0x7f and 0xff give NaN.

    Raises TypeError for codes that are not uint8 or a `dtype` that is not floating.
    """
    check_bytes("fp8.e4m3_decode", "codes", codes)
    check_float("fp8.e4m3_decode", "dtype", dtype)
    bits = codes.to(torch.int32)
    field, fraction = (bits >> 3) & 15, bits & 7
    significand = torch.where(field == 0, fraction, fraction + 8).to(math_dtype(dtype))
    value = significand * _pow2(field.clamp(min=1) - 10, significand.dtype)
    value = torch.where((bits & 128) != 0, -value, value)
    return torch.where((bits & 127) == 127, torch.nan, value).to(dtype)


def ue8m0_encode(x: Tensor, limit: float = 1.0, rounding: str = "ceil") -> Tensor:
    """The UE8M0 byte of a power of two for `x / limit`, (...) to uint8 (...).

    x: numbers whose sign is ignored, usually the amax of a block; limit: the largest element, > 0.
    "ceil" is 2^ceil(log2(x / limit)), the smallest scale under which x does not exceed the limit;
    "floor" is 2^(floor(log2 x) - floor(log2 limit)) (OCP Microscaling Formats v1.0, section 6.3),
    under which it may. Both are exact: they compare exponents and significands, so that for a
    float32 bit pattern b with exponent field E and fraction F the byte is

        clamp(E - floor(log2 limit) + (F > fraction of limit, with "ceil"), 0, 254)

    when the limit is 2 or more. Zero gives 0; an infinity counts as 2^128, the number that its
    exponent field would spell; NaN gives 255.

    Raises TypeError for a dtype that is not floating, ValueError for an unknown rounding or a limit
    that is not positive and finite.
    """
    check_float("fp8.ue8m0_encode", "x", x.dtype)
    check_choice("fp8.ue8m0_encode", "rounding", rounding, ROUNDINGS)
    if not 0.0 < limit < math.inf:
        raise ValueError(f"fp8.ue8m0_encode: limit is {limit}; accepted: positive finite numbers")
    wide = x.abs().to(torch.float64)  # Subnormal float32 numbers are normal here.
    wide = torch.where(wide.isinf(), 2.0**128, wide)
    fraction = wide.view(torch.int64) & ((1 << 52) - 1)
    limit_significand, limit_exponent = math.frexp(limit)  # In [1/2, 1), one exponent higher.
    byte = _exponent(wide) - (limit_exponent - 1) + 127
    if rounding == "ceil":
        byte = byte + (fraction > int(math.ldexp(2.0 * limit_significand - 1.0, 52)))
    return torch.where(wide.isnan(), 255, byte.clamp(0, 254)).to(torch.uint8)


def ue8m0_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """UE8M0 bytes (...) to 2^(byte - 127) in `dtype` (...); 255 gives NaN.

    Exact in float64 and float32 (byte 0 is a subnormal float32) and in bfloat16; float16 overflows
    and underflows outside its range. Raises TypeError as `e4m3_decode` does.
    """
    check_bytes("fp8.ue8m0_decode", "codes", codes)
    check_float("fp8.ue8m0_decode", "dtype", dtype)
    bits = codes.to(torch.int32)
    pattern = torch.where(bits == 0, 1 << 22, torch.where(bits == 255, 0x7FC00000, bits << 23))
    return pattern.view(torch.float32).to(dtype)


def ue8m0_reciprocal(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(127 - byte): what an element is multiplied by before it is rounded; 255 gives NaN."""
    check_bytes("fp8.ue8m0_reciprocal", "codes", codes)
    return ue8m0_decode(254 - codes, dtype)  # 254 - 255 wraps to 255: NaN stays NaN.


def quantize(x: Tensor, *, block: int = MXFP8_BLOCK, rounding: str = "ceil") -> tuple[Tensor, Tensor]:
    """Floats (..., K) to E4M3 bytes (..., K) and UE8M0 scale bytes (..., K/block).

    block 32 is MXFP8, 64 the rows of `kv_cache`. scale = ue8m0_encode(amax, 448, rounding), element
    = e4m3(x * 2^-k), an exact product before the one rounding. amax skips NaN, whose element is NaN
    (0x7f). A block of zeros has scale byte 0 and zero elements that keep their signs.

    Raises TypeError for a dtype that is not floating, ValueError for K that is not a multiple of
    block or an unknown rounding.
    """
    check_choice("fp8.quantize", "rounding", rounding, ROUNDINGS)
    blocks = split("fp8.quantize", x, block)  # (..., K/block, block)
    scale = ue8m0_encode(amax(blocks), E4M3_MAX, rounding)  # (..., K/block)
    codes = e4m3_encode(blocks * ue8m0_reciprocal(scale, blocks.dtype).unsqueeze(-1))
    return codes.flatten(-2), scale


def dequantize(codes: Tensor, scale: Tensor, *, block: int = MXFP8_BLOCK, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 bytes (..., K) and UE8M0 bytes (..., K/block) to floats (..., K) in `dtype`.

    The product is exact in float32 up to 2^128, then rounded once to `dtype`. Raises TypeError and
    ValueError for dtypes and shapes other than these.
    """
    check_bytes("fp8.dequantize", "codes", codes)
    check_float("fp8.dequantize", "dtype", dtype)
    check_axis("fp8.dequantize", "codes", codes, block)
    count = codes.shape[-1] // block
    check_scale("fp8.dequantize", scale, codes.shape[:-1], count)
    elements = e4m3_decode(codes, math_dtype(dtype)).reshape(*scale.shape, block)
    value = elements * ue8m0_decode(scale, elements.dtype).unsqueeze(-1)  # (..., K/block, block)
    return value.flatten(-2).to(dtype)
