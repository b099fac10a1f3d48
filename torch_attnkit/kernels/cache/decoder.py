"""Dequantisation of encoded rows in registers, 8 channels at a time, as ``formats/kv_cache.py`` defines them.

Callers load codes, scale byte and the bfloat16 RoPE channels.
"""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32

from torch_attnkit.cuda import e4m3, fp4
from torch_attnkit.cuda.fp4_blocks import Reader
from torch_attnkit.cuda.warp_ops import pack

from .problem import Row


class Decoder:
    """To ``dtype``: words of two 16-bit values, or of one float32."""

    def __init__(self, row: Row, dtype: Any):
        self.row, self.dtype = row, dtype
        self.read = Reader(row.format, dtype)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.row.format == "fp8" else 4

    def divisor(self, global_scale: Float32) -> Any:
        """A global scale as ``nope`` takes it; once per thread."""
        return self.read.divisor(global_scale)

    def nope(self, codes: list[Any], byte: Any, gs: Any) -> list[Any]:
        """Words of values from words of codes, the scale byte of their block, and a ``divisor`` or None."""
        if self.row.format != "fp8":
            return self.read.values(codes, byte, gs)
        scale = fp4.ue8m0_value(byte)
        halves = (half for word in codes for half in (word, word >> 16))
        return self._words([tuple(fp4.times(x, scale) for x in e4m3.values(half)) for half in halves])

    def rope(self, pairs: list[Any]) -> list[Any]:
        """Words of values from words of bfloat16 pairs, which bfloat16 keeps bit for bit."""
        return pairs if self.dtype is BFloat16 else self._words([fp4.floats(BFloat16, pair) for pair in pairs])

    def _words(self, pairs: list[Any]) -> list[Any]:
        """Pairs of Float32 rounded to the dtype."""
        if self.dtype is Float32:
            return [x.bitcast(Int32) for pair in pairs for x in pair]
        return [pack(self.dtype, *pair) for pair in pairs]
