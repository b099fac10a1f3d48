"""E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3).

A code is sign * 8 + magnitude; VALUES[code] is its number. There is no infinity and no NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import check_axis, check_bytes, check_float

MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def encode(x: Tensor) -> Tensor:
    """Floats (...) to codes 0..15, uint8 (...).

    Round to nearest, ties to the even code (0.25 to 0, 0.75 and 1.25 to 1, 1.75 and 2.5 to 2, 3.5
    and 5 to 4), saturating at 6, so that infinities give 6 of their sign. The sign is kept, that of
    zero too. NaN gives +6 (code 7) whatever its sign. These are the results of
    `cvt.rn.satfinite.e2m1x2`. The comparison is exact in every dtype.

    Raises TypeError for a dtype that is not floating.
    """
    check_float("e2m1.encode", "x", x.dtype)
    a = x.abs()
    # The magnitude is the number of midpoints passed; a midpoint itself goes to the even neighbour.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code = code + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return torch.where(x.isnan(), 7, code + 8 * torch.signbit(x)).to(torch.uint8)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes 0..15, uint8 (...), to their numbers in `dtype` (...). Exact; bits 4..7 are ignored.

    Raises TypeError for codes that are not uint8 or a `dtype` that is not floating.
    """
    check_bytes("e2m1.decode", "codes", codes)
    check_float("e2m1.decode", "dtype", dtype)
    bits = codes.to(torch.int32)
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    # Twice the number is an integer: the hidden bit is there unless the exponent field is 0.
    twice = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    value = twice.to(dtype) * 0.5
    return torch.where((bits & 8) != 0, -value, value)


def pack(codes: Tensor) -> Tensor:
    """Codes (..., K) to bytes (..., K/2): element 2i in the low nibble of byte i, 2i + 1 in the
    high nibble.

    Raises TypeError for codes that are not uint8, ValueError for an odd K.
    """
    check_bytes("e2m1.pack", "codes", codes)
    check_axis("e2m1.pack", "codes", codes, 2)
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)  # (..., K/2)


def unpack(packed: Tensor) -> Tensor:
    """Bytes (..., K/2) to codes 0..15, uint8 (..., K): the inverse of `pack`."""
    check_bytes("e2m1.unpack", "packed", packed)
    check_axis("e2m1.unpack", "packed", packed, 1)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # (..., K)
