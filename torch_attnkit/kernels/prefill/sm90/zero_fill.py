"""Zero-fill of rows with no visible key, which queries of a block longer than its sequence are: out = 0, lse = -inf.

A causal mask gives them nothing; where all queries of a block see all keys, this launch behind attention clears them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.ring import Fixed

_THREADS = 128
_BLOCKS = 16  # of a sequence, which share its rows
_VECTOR = 8  # elements of 16 bits


class ZeroFill(Fixed):
    @cute.jit
    def __call__(self, mOut: cute.Tensor, mLse: cute.Tensor, mLength: cute.Tensor, keys: Int32, stream: Any):
        """mOut (B, T, Hq, Dv), mLse (B, T, Hq), mLength (B): how many of the cache's ``keys`` a sequence has."""
        self.kernel(mOut, mLse, mLength, keys).launch(
            grid=[_BLOCKS, Int32(mOut.shape[0]), 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, mLse: cute.Tensor, mLength: cute.Tensor, keys: Int32):
        share, batch, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        heads, chunks = Int32(mOut.shape[2]), Int32(mOut.shape[3]) // _VECTOR
        length = cutlass.max(cutlass.min(Int32(mLength[batch]), keys), Int32(0))
        zeros = cute.make_rmem_tensor(_VECTOR, mOut.element_type)
        zeros.fill(0.0)
        for token in cutlass.range(share, Int32(mOut.shape[1]) - length, _BLOCKS, unroll=1):
            for i in cutlass.range(thread, heads * chunks, _THREADS, unroll=1):
                copies.store(zeros, mOut[batch, token, i // chunks, None].iterator + i % chunks * _VECTOR)
            for head in cutlass.range(thread, heads, _THREADS, unroll=1):
                mLse[batch, token, head] = -Float32.inf


def trace(dtype: str) -> tuple[Any, list[Any]]:
    B, T, Hq = (fake.dim32() for _ in range(3))
    out = fake.tensor(dtype, (B, T, Hq, fake.dim32()), (*(fake.dim(_VECTOR) for _ in range(3)), 1))
    lse = fake.tensor("f32", (B, T, Hq), align=4)
    return ZeroFill(), [out, lse, fake.tensor("i32", (B,), (None,), align=4), Int32(0), fake.stream()]
