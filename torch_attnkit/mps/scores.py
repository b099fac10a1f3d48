"""Scalars of the attention kernels, as ``attnkit/visible.h`` expects them."""

from __future__ import annotations


def score_factors(dim: int, scale: float | None, softcap: float) -> tuple[float, float]:
    """What a product of q and k is multiplied by before it is capped, and the cap; 0.0: no cap."""
    scale = dim**-0.5 if scale is None else scale
    return (scale / softcap, softcap) if softcap > 0 else (scale, 0.0)


def bounded(count: int) -> int:
    """A window or a number of sink tokens, cut to what no cache exceeds: sums with positions stay in 32 bits."""
    return min(count, 1 << 30)
