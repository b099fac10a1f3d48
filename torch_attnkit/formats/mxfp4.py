"""MXFP4: E2M1 elements in blocks of 32 under a UE8M0 scale (OCP Microscaling Formats v1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import e2m1, fp8
from .blocks import amax, check_axis, check_bytes, check_choice, check_float, check_scale, math_dtype, split

BLOCK = 32


def quantize(x: Tensor, rounding: str = "ceil") -> tuple[Tensor, Tensor]:
    """Floats (..., K) to packed E2M1 (..., K/2) and UE8M0 scale bytes (..., K/32), both uint8.

    rounding: "ceil" scales by 2^ceil(log2(amax / 6)), so that nothing saturates; "floor" by
    2^(floor(log2 amax) - 2), under which magnitudes between 6 and 8 of the scale saturate. Both are
    exact (see `fp8.ue8m0_encode`). element = e2m1(x * 2^(127 - byte)), an exact product before the
    one rounding, so that every dtype gives the bytes of its values in float64. Numbers below 2^-126
    count: arithmetic that flushes them to zero gives other codes under scale bytes 0 to 2.

    A block of zeros has scale byte 0 (2^-127) and zero codes that keep their signs. amax skips NaN,
    whose code is +6; an infinity gives scale byte 253 and a code of +-6, an infinity again in
    float32.

    Raises TypeError for a dtype that is not floating, ValueError for K that is not a multiple of 32
    or an unknown rounding.
    """
    check_choice("mxfp4.quantize", "rounding", rounding, fp8.ROUNDINGS)
    blocks = split("mxfp4.quantize", x, BLOCK)  # (..., K/32, 32)
    scale = fp8.ue8m0_encode(amax(blocks), e2m1.MAX, rounding)  # (..., K/32)
    scaled = blocks * fp8.ue8m0_reciprocal(scale, blocks.dtype).unsqueeze(-1)
    return e2m1.pack(e2m1.encode(scaled).flatten(-2)), scale


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed E2M1 (..., K/2) and UE8M0 bytes (..., K/32) to floats (..., K) in `dtype`.

    The product is exact in float32 up to 2^128 (scale byte 254 can exceed it), then rounded once to
    `dtype`. Scale byte 255 gives NaN. Raises TypeError for dtypes, ValueError for shapes.
    """
    op = "mxfp4.dequantize"
    check_bytes(op, "packed", packed)
    check_float(op, "dtype", dtype)
    check_axis(op, "packed", packed, BLOCK // 2)
    check_scale(op, scale, packed.shape[:-1], packed.shape[-1] // (BLOCK // 2))
    elements = e2m1.decode(e2m1.unpack(packed), math_dtype(dtype)).reshape(*scale.shape, BLOCK)
    value = elements * fp8.ue8m0_decode(scale, elements.dtype).unsqueeze(-1)  # (..., K/32, 32)
    return value.flatten(-2).to(dtype)
