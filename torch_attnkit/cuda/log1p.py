"""log(1 + e) without the sum, which would lose the digits of a small e."""

from __future__ import annotations

from cutlass import Float32

from .warp_ops import fma

# After the first coefficient, 1: the best of degree 8.
_RATIO = (-0.49999648332595825, 0.333213210105896, -0.24857157468795776, 0.1915363371372223,
          -0.13753755390644073, 0.07920398563146591, -0.030065450817346573, 0.005364738870412111)  # fmt: skip


def log1p_ratio(e: Float32) -> Float32:
    """log(1 + e) / e on [0, 1], within 3.3e-8."""
    p = Float32(_RATIO[-1])
    for c in (*_RATIO[-2::-1], 1.0):
        p = fma(p, e, Float32(c))
    return p
