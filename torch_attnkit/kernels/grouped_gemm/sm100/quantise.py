"""Numbers of a row as E2M1 or E4M3 under block scales, bit for bit as ``formats/`` defines them."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fp4
from torch_attnkit.cuda.sm100.e2m1 import amax, e2m1_pairs
from torch_attnkit.cuda.warp_ops import pack_e4m3

from .config import TOKEN_BLOCK


class Quantised(NamedTuple):
    codes: list[Int32]  # eight a word, or four
    scales: list[Int32]  # a byte each


def quantised(format: str, numbers: list[Any], global_scale: Float32) -> Quantised:
    """Whole blocks of a row."""
    block, codes, scales = TOKEN_BLOCK[format], [], []
    for first in range(0, len(numbers), block):
        some = numbers[first : first + block]
        top = amax(some)
        if format == "nvfp4":
            byte, scale = fp4.nvfp4_scale(top, global_scale)
            factor = fp4.nvfp4_factor(scale, global_scale)
        else:
            byte, _ = fp4.mxfp8_scale(top) if format == "mxfp8" else fp4.mxfp4_scale(top)
            factor = fp4.ue8m0_reciprocal(byte)
        scaled: list[Any] = []
        for i in range(0, block, 2):
            scaled += cute.arch.mul_packed_f32x2((some[i], some[i + 1]), (factor, factor))
        if format == "mxfp8":
            codes += [pack_e4m3(scaled[i : i + 4]) for i in range(0, block, 4)]
        else:
            codes += [e2m1_pairs(scaled[i : i + 8]) for i in range(0, block, 8)]
        scales.append(byte)
    return Quantised(codes, scales)
