"""Blocks of E2M1 numbers in registers of Blackwell, which converts to E2M1 itself.

    a block's numbers -> amax -> scale, its reciprocal -> eight codes a word, scale byte

Bit for bit what ``cuda/fp4_blocks.py`` gives, whose scales these are: there a code is nine instructions, here a product
and half a conversion, and no block is another case than the others.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .. import fp4
from .e2m1 import amax, e2m1_pairs

_PER_WORD = 8  # numbers, whose codes are a word


class Quantizer:
    """``format`` is nvfp4 or mxfp4. A block lies in ``lanes`` neighbouring threads of a warp, a power of two; if they
    are several, all threads of the warp must call."""

    def __init__(self, format: str, lanes: int = 1):
        self.nvfp4, self.lanes = format == "nvfp4", lanes

    @cute.jit
    def __call__(self, x: list[Any], gs: Any):
        """The codes of a thread's numbers x, eight a word, and the scale byte of their block; ``gs`` is the global
        scale or None, which is 1. NaN has no part in a scale, and its code is that of 6."""
        top = amax(x)
        if const_expr(self.lanes > 1):
            top = cute.arch.warp_reduction(top, cute.arch.fmax, threads_in_group=self.lanes)
        if const_expr(self.nvfp4):
            byte, scale = fp4.nvfp4_scale(top, gs)
            r = fp4.nvfp4_factor(scale, gs)
        else:
            byte, _ = fp4.mxfp4_scale(top)
            r = fp4.ue8m0_reciprocal(byte)
        codes = cute.make_rmem_tensor(len(x) // _PER_WORD, Int32)
        for i in cutlass.range_constexpr(len(x) // _PER_WORD):
            codes[i] = e2m1_pairs([fp4.times(y, r) for y in x[_PER_WORD * i : _PER_WORD * (i + 1)]])
        return codes, byte
