"""K order of activations: that in which a packed word of FP4 weights is decoded.

Element ``32 c + 8 w + 4 b + q`` of 128 stands at ``32 w + 8 q + 2 c + b``, so that the words that lane c of a quad
decodes from 16 bytes of packed weights meet its part of eight k-steps, by ``mma.sync`` as by ``wgmma`` (PTX ISA,
"Matrix fragments for mma.m16n8k16" and "for wgmma.mma_async.m64nNk16").
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from torch_attnkit.cuda import warp_ops as op

from .problem import SPAN

EACH = 32  # elements of a row that a lane loads
_CHUNK = 8  # of them under a word of packed weights
_UPPER = 0xFFFF0000  # half of a word


def permuted(number: Any) -> Any:
    """Where element ``number`` of a row is stored."""
    n = number % SPAN
    return number - n + n % 32 // 8 * 32 + n % 4 * 8 + n // 32 * 2 + n % 8 // 4


def split(x: Float32) -> tuple[Float32, Float32]:
    """A float16 value as the sum of two of bf16; infinities and NaN are the first alone."""
    bits = x.bitcast(Uint32) & Uint32(_UPPER)
    high = bits.bitcast(Float32)
    return high, Float32(cutlass.select_((bits & 0x7F800000) == 0x7F800000, Float32(0.0), x - high))


def operands(rV: cute.Tensor, parts: int) -> list[list[Any]]:
    """32 elements as words of bf16, 4 for each chunk of 8: elements i and i + 4. Two lists if they are sums of two
    bf16, of which infinities and NaN are the first alone."""
    if rV.element_type is cutlass.BFloat16:
        words = cute.recast_tensor(rV, Uint32)
        return [_pairs_of_words(words)]
    if parts == 1:
        return [_pairs(rV)]
    rX = cute.make_rmem_tensor(EACH, Float32)
    rX.store(rV.load().to(Float32))
    rHigh = cute.make_rmem_tensor(EACH, Float32)
    for i in range(EACH):
        rHigh[i], rX[i] = split(rX[i])
    return [_pairs(rHigh), _pairs(rX)]


def _pairs(rX: cute.Tensor) -> list[Any]:
    x = rX if rX.element_type is Float32 else cute.make_rmem_tensor(EACH, Float32)
    if x is not rX:
        x.store(rX.load().to(Float32))
    starts = range(0, EACH, _CHUNK)
    return [op.pack(cutlass.BFloat16, x[s + i], x[s + i + 4]) for s in starts for i in range(4)]


def _pairs_of_words(words: cute.Tensor) -> list[Any]:
    out = []
    for s in range(0, EACH // 2, 4):
        for i in range(2):
            low, high = words[s + i], words[s + i + 2]
            out += [(low & 0xFFFF) | (high << 16), (low >> 16) | (high & Uint32(_UPPER))]
    return out
