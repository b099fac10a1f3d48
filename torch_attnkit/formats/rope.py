"""Rotary position embedding of part of a head (Su et al., RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import check_axis, check_broadcast, check_float, math_dtype


def apply(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool = False,
    trailing: bool = True,
) -> Tensor:
    """Rotate R = 2 * cos.shape[-1] channels of x (..., D), copy the others. Result in x.dtype.

    cos, sin: (..., R/2), broadcastable to the batch axes of x. Pair i is (2i, 2i + 1) if
    interleaved, else (i, i + R/2), counted inside the rotated channels, which are the last R of D
    if trailing, else the first R. A pair (a, b) becomes (a cos - b sin, b cos + a sin); inverse
    negates sin.

    The arithmetic is in float32 (float64 for a float64 x): two products and their sum, each
    rounded, without fused multiply-add; then one rounding to x.dtype.

    Raises TypeError for dtypes that are not floating, ValueError for cos and sin of different
    shapes, an R beyond D, or angles that do not broadcast.
    """
    op = "rope.apply"
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        check_float(op, name, t.dtype)
        check_axis(op, name, t, 1)
    if cos.shape != sin.shape:
        raise ValueError(f"{op}: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; accepted: equal shapes")
    head_dim, half = x.shape[-1], cos.shape[-1]
    if 2 * half > head_dim:
        raise ValueError(
            f"{op}: cos has last axis {half}, for {2 * half} rotated channels; accepted: at most "
            f"{head_dim // 2}, half of the last axis of x"
        )
    check_broadcast(op, "cos", cos.shape[:-1], x.shape[:-1])
    dtype = math_dtype(x.dtype)
    c, s = cos.to(dtype), sin.to(dtype)  # (..., R/2)
    if inverse:
        s = -s
    start = head_dim - 2 * half if trailing else 0
    stop = start + 2 * half
    axis = -1 if interleaved else -2
    halves = (half, 2) if interleaved else (2, half)
    pairs = x[..., start:stop].to(dtype).reshape(*x.shape[:-1], *halves)
    a, b = pairs.select(axis, 0), pairs.select(axis, 1)  # (..., R/2) each
    turned = torch.stack((a * c - b * s, b * c + a * s), dim=axis).flatten(-2)  # (..., R)
    return torch.cat((x[..., :start], turned.to(x.dtype), x[..., stop:]), dim=-1)  # (..., D)
