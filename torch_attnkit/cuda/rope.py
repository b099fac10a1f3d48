"""Rotary position embedding of values in registers, bit for bit as ``formats/rope.py`` defines it."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .fp4 import floats, times
from .warp_ops import pack


def rotated_back(a: Float32, b: Float32, cos: Float32, sin: Float32) -> tuple[Any, Any]:
    """Inverse rotation of the pair (a, b): two products and their sum, each rounded."""
    return times(a, cos) + times(b, sin), times(b, cos) - times(a, sin)


def rotate_back(fragment: Any, cos: list[Any], sin: list[Any], from_pair: Any) -> None:
    """Inverse RoPE of a fragment's interleaved pairs, in place, from element ``from_pair`` on; each rounded to its
    dtype.

    Where ``from_pair`` is not 0, 0 or less stands for all pairs.
    """
    dtype = fragment.element_type
    words = cute.recast_tensor(fragment, Int32)
    for i, (c, s) in enumerate(zip(cos, sin, strict=True)):
        if dtype is Float32:
            old = fragment[2 * i], fragment[2 * i + 1]
            new = rotated_back(*old, c, s)
        else:
            old = (words[i],)
            new = (pack(dtype, *rotated_back(*floats(dtype, words[i]), c, s)),)
        if not isinstance(from_pair, int) or from_pair > 0:
            new = tuple(cutlass.select_(from_pair <= i, n, o) for n, o in zip(new, old, strict=True))
        if dtype is Float32:
            fragment[2 * i], fragment[2 * i + 1] = new
        else:
            words[i] = new[0]
