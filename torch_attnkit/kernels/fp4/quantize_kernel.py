"""Quantise to FP4: rows of 16 or 32 bits to packed E2M1 and a scale a block.

    thread: block of x -> registers -> amax -> scale, its reciprocal -> eight codes a word -> codes, scale byte

In the 128x4 layout the threads are numbered as the bytes of the scales are, padding included: the sixteen scales that
lie together there are four columns of four rows, so that the scales of a warp leave side by side and its loads are of
four neighbouring blocks. Threads of the padding write a zero and nothing else.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.fp4_blocks import Quantizer, floats_of

from . import rows
from .plan import TILE, Config
from .problem import BLOCK


class _Quantizer:
    def __init__(self, format: str, swizzled: bool, floor: bool, config: Config):
        self.quantize, self.block = Quantizer(format, floor), BLOCK[format]
        self.swizzled, self.c = swizzled, config

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (..., K)
        mGlobal: cute.Tensor | None,  # ()
        mCodes: cute.Tensor,  # (..., K/2), contiguous
        mScale: cute.Tensor,  # (..., K/block) or (padded rows, padded K/block), contiguous
        units: Int32,  # scales, padding included
        rows: Int32,
        kb: Int32,  # blocks of a row
        reciprocal: tuple,  # of kb, in the 128x4 layout of the tiles in a row of them
        sizes: tuple,  # of the batch axes after merging
        steps: tuple,  # their strides
        stream: cuda.CUstream,
    ):
        share = const_expr(self.c.threads * self.c.units)
        self.kernel(mX, mGlobal, mCodes, mScale, units, rows, kb, reciprocal, sizes, steps).launch(
            grid=((units + (share - 1)) // share, 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mGlobal: cute.Tensor | None,
        mCodes: cute.Tensor,
        mScale: cute.Tensor,
        units: Int32,
        rows_: Int32,
        kb: Int32,
        reciprocal: tuple,
        sizes: tuple,
        steps: tuple,
    ):
        c, block = self.c, const_expr(self.block)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        rX = [copies.fragments(block // c.width, c.width, mX.element_type) for _ in range(c.units)]
        first = [(cta * c.units + u) * c.threads for u in range(c.units)]
        located = [self.locate(f, tid, units, rows_, kb, reciprocal, sizes, steps) for f in first]
        for u in cutlass.range_constexpr(c.units):
            inside, _, before = located[u]
            if inside:
                rows.load(mX.iterator + before, rX[u])
        for u in cutlass.range_constexpr(c.units):
            inside, at, _ = located[u]
            scale = mScale.iterator + (first[u] + tid)
            if inside:
                x, pairs = floats_of(rX[u])
                codes, byte = self.quantize(x, pairs, mX.element_type, gs)
                rows.store_words([codes[i] for i in range(block // 8)], mCodes.iterator + Int64(at) * (block // 2))
                rows.store_byte(byte, scale)
            if const_expr(self.swizzled):
                if not inside and first[u] + tid < units:
                    rows.store_byte(Int32(0), scale)

    def locate(
        self, first: Int32, tid: Int32, units: Int32, rows_: Int32, kb: Int32, reciprocal: tuple, sizes: tuple,
        steps: tuple,
    ):  # fmt: skip
        """Of unit ``first + tid``: whether it is a block, the block's number, and the elements of x before it."""
        block = self.block
        if self.c.flat:
            at = first + tid
            return at < units, at, Int64(at) * block
        if self.swizzled:
            tile, byte = first // TILE, first % TILE + tid
            tile_row = rows.quotient(tile, reciprocal)
            row = tile_row * 128 + (byte >> 4) + ((byte >> 2) & 3) * 32
            k = (tile - tile_row * ((kb + 3) >> 2)) * 4 + (byte & 3)
            return (row < rows_) & (k < kb), row * kb + k, rows.offset(row, sizes, steps) + Int64(k) * block
        at = first + tid
        row = rows.quotient(at, reciprocal)
        k = at - row * kb
        return at < units, at, rows.offset(row, sizes, steps) + Int64(k) * block


def trace(
    arch: str,
    format: str,
    dtype: str,
    rank: int,
    groups: int,
    swizzled: bool,
    global_scale: bool,
    floor: bool,
    config: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``groups`` is the number of batch axes after merging."""
    c = Config(*config)
    arguments = [
        fake.tensor(dtype, (None,) * rank, align=c.width * fake.dtype(dtype).width // 8),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.tensor("u8", (None,) * rank, align=16),
        fake.tensor("u8", (None,) * (2 if swizzled else rank), align=16),
        *(Int32(0),) * 3,
        (Int64(0), Int32(0)),
        (Int32(0),) * groups,
        (Int64(0),) * groups,
        fake.stream(),
    ]
    return _Quantizer(format, swizzled, floor, c), arguments
