"""Numbers of encoded rows in the registers of a thread, eight at a time, as ``formats/kv_cache.py`` defines them.

Whoever gathers rows or attends them brings the codes, the scale's byte and the pairs in bfloat16.
"""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32

from torch_attnkit.cuda import fp4
from torch_attnkit.cuda.fp4_blocks import Reader
from torch_attnkit.cuda.warp_ops import pack

from .problem import Row


class Decoder:
    """Of rows that are not plain, in ``dtype``: words of pairs of 16-bit numbers, or of float32."""

    def __init__(self, row: Row, dtype: Any):
        self.row, self.dtype = row, dtype
        self.read = Reader(row.format, dtype)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.row.format == "fp8" else 4

    def divisor(self, global_scale: Float32) -> Any:
        """What ``nope`` takes for a global scale: worked out once a thread."""
        return self.read.divisor(global_scale)

    def nope(self, codes: list[Any], byte: Any, gs: Any) -> list[Any]:
        """The words of numbers from those of their codes, the scale byte of their block, and a ``divisor`` or None."""
        if self.row.format != "fp8":
            return self.read.numbers(codes, byte, gs)
        scale = fp4.ue8m0_value(byte)
        halves = (half for word in codes for half in (word, word >> 16))
        return self._words([tuple(fp4.times(x, scale) for x in fp4.e4m3_values(half)) for half in halves])

    def rope(self, pairs: list[Any]) -> list[Any]:
        """The words of numbers from pairs in bfloat16, of which bfloat16 keeps every bit."""
        return pairs if self.dtype is BFloat16 else self._words([fp4.floats(BFloat16, pair) for pair in pairs])

    def _words(self, pairs: list[Any]) -> list[Any]:
        """Pairs of Float32 rounded to the dtype of the result."""
        if self.dtype is Float32:
            return [x.bitcast(Int32) for pair in pairs for x in pair]
        return [pack(self.dtype, *pair) for pair in pairs]
