"""NVFP4: E2M1 elements in blocks of 16, an E4M3 scale per block, one float32 per tensor.

The per-tensor number multiplies: stored = x * global_scale, global_scale = 448 * 6 / amax. A tensor
made under the dividing convention (amax / (448 * 6)) is read with the reciprocal of its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import e2m1, fp8
from .blocks import (
    amax,
    check_axis,
    check_broadcast,
    check_bytes,
    check_float,
    check_scale,
    math_dtype,
    split,
)

BLOCK = 16
# Under a larger global scale, float32 numbers below 2^-126 would reach the elements, and hardware
# that flushes them to zero would give other codes than hardware that does not.
GLOBAL_SCALE_MAX = 2.0**115


def global_scale(x: Tensor, batch_axes: int = 0) -> Tensor:
    """448 * 6 / amax as float32, over all of x (0-dim) or per leading batch axis (their shape).

    The division is one float32 operation on amax rounded to float32. amax skips NaN and counts
    infinity as the largest float32; amax 0, and an empty x, give 1; the result is at most
    GLOBAL_SCALE_MAX.

    Raises TypeError for a dtype that is not floating, ValueError for batch_axes outside 0
    to x.dim() - 1.
    """
    check_float("nvfp4.global_scale", "x", x.dtype)
    if not 0 <= batch_axes < max(x.dim(), 1):
        raise ValueError(
            f"nvfp4.global_scale: batch_axes is {batch_axes} for {x.dim()} axes; accepted: 0 to {max(x.dim() - 1, 0)}"
        )
    batch = x.shape[:batch_axes]
    if x.numel() == 0:
        return torch.ones(batch, dtype=torch.float32, device=x.device)
    top = amax(x.reshape(*batch, -1)).to(torch.float32)  # batch
    top = top.clamp(max=torch.finfo(torch.float32).max)
    scale = (torch.full_like(top, fp8.E4M3_MAX * e2m1.MAX) / top).clamp(max=GLOBAL_SCALE_MAX)
    return torch.where(top == 0, 1.0, scale)


def _per_block(op: str, scale: Tensor | None, batch: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The global scale in `dtype`, 0-dim or with one more axis, to be broadcast over the blocks."""
    if scale is None:
        return torch.ones((), dtype=dtype, device=like.device)
    if scale.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: global_scale is {scale.dtype}; accepted: torch.float32, torch.float64")
    check_broadcast(op, "global_scale", scale.shape, batch)
    return scale.to(dtype).unsqueeze(-1) if scale.dim() else scale.to(dtype)


def quantize(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Floats (..., K) to packed E2M1 (..., K/2) and E4M3 scale bytes (..., K/16), both uint8.

    global_scale: float32 0-dim, or broadcastable to the batch axes of x; None is 1. It should be
    positive and at most GLOBAL_SCALE_MAX. With any other the operations below give what they give:
    under 0 nothing but zeros, under infinity scales of 448 and elements of 6, under NaN and where 0
    meets infinity scales of NaN; under a negative number scales of its sign.

    The operations, each rounded to float32 (to float64 for a float64 x), in this order:

        t  = amax(block) / 6               division, not a product with 1/6
        sf = e4m3(t * global_scale)        ties to even, saturating at 448
        r  = global_scale / sf             0 where sf is 0
        element = e2m1(x * r)              ties to even, saturating at 6

    A block whose scale underflows to 0, and a block of zeros, has scale byte 0 and zero codes that
    keep their signs. amax skips NaN, whose code is +6. A float64 x gives the codes of the same
    values in float32 except where one of the float32 roundings above crosses a boundary between
    codes.

    Raises TypeError for dtypes, ValueError for K that is not a multiple of 16 or a global_scale
    that does not broadcast.
    """
    blocks = split("nvfp4.quantize", x, BLOCK)  # (..., K/16, 16)
    gs = _per_block("nvfp4.quantize", global_scale, x.shape[:-1], blocks.dtype, x)
    top = amax(blocks)  # (..., K/16)
    # Dividing by a tensor: for a Python number some devices multiply by its rounded reciprocal.
    scale = fp8.e4m3_encode(top / torch.full_like(top, e2m1.MAX) * gs)
    sf = fp8.e4m3_decode(scale, blocks.dtype)
    r = torch.where(sf == 0, 0.0, gs / sf)
    codes = e2m1.encode(blocks * r.unsqueeze(-1)).flatten(-2)  # (..., K)
    return e2m1.pack(codes), scale


def dequantize(
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Packed E2M1 (..., K/2) and E4M3 bytes (..., K/16) to floats (..., K) in `dtype`.

    element * sf is exact in float32; its quotient by global_scale is rounded to float32 (to float64
    if `dtype` is float64), then to `dtype`. An element of 0 is not divided: it stays 0 under any
    global_scale, of 0, infinity or NaN too, by which the others become what the quotient is.

    Raises TypeError for dtypes, ValueError for shapes other than these.
    """
    op = "nvfp4.dequantize"
    check_bytes(op, "packed", packed)
    check_float(op, "dtype", dtype)
    check_axis(op, "packed", packed, BLOCK // 2)
    check_scale(op, scale, packed.shape[:-1], packed.shape[-1] // (BLOCK // 2))
    gs = _per_block(op, global_scale, packed.shape[:-1], math_dtype(dtype), packed)
    elements = e2m1.decode(e2m1.unpack(packed), gs.dtype).reshape(*scale.shape, BLOCK)
    value = elements * fp8.e4m3_decode(scale, gs.dtype).unsqueeze(-1)  # (..., K/16, 16)
    return torch.where(elements == 0, value, value / gs.unsqueeze(-1)).flatten(-2).to(dtype)
