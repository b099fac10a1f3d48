"""Dequantise FP4: packed E2M1 and a scale a block to rows of 16 or 32 bits.

thread: scale byte -> the values of codes 0 to 7, rounded -> table of bytes
        eight codes -> looked up four at a time -> signs -> 16 bytes of x, 32 of float32
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.fp4_blocks import Reader

from . import rows
from .plan import CODES, Config
from .problem import BLOCK


class _Dequantizer:
    def __init__(self, format: str, dtype: str, swizzled: bool, dense: bool, config: Config):
        self.read = Reader(format, fake.dtype(dtype))
        self.shift = (BLOCK[format] // CODES).bit_length() - 1  # 2^shift groups of codes are under one scale
        self.swizzled, self.dense, self.c = swizzled, dense, config

    @cute.jit
    def __call__(
        self,
        mCodes: cute.Tensor,  # (..., K/2)
        mScale: cute.Tensor,  # (..., K/block) or (padded rows, padded K/block)
        mGlobal: cute.Tensor | None,  # ()
        mX: cute.Tensor,  # (..., K), contiguous
        units: Int32,  # groups of codes
        where: tuple,  # the arguments of ``locate`` behind its first
        stream: cuda.CUstream,
    ):
        share = const_expr(self.c.threads * self.c.units)
        self.kernel(mCodes, mScale, mGlobal, mX, units, where).launch(
            grid=((units + (share - 1)) // share, 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCodes: cute.Tensor,
        mScale: cute.Tensor,
        mGlobal: cute.Tensor | None,
        mX: cute.Tensor,
        units: Int32,
        where: tuple,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        gs = None
        if const_expr(mGlobal is not None):
            gs = self.read.divisor(copies.scalar(mGlobal.iterator))
        unit = [(cta * c.units + u) * c.threads + tid for u in range(c.units)]
        rCodes = [copies.fragments(4 // c.width, c.width, mCodes.element_type) for _ in range(c.units)]
        rScale = copies.fragments(c.units, 1, mScale.element_type)
        for u in cutlass.range_constexpr(c.units):
            if unit[u] < units:
                codes, scale = self.locate(unit[u], *where)
                rows.load(mCodes.iterator + codes, rCodes[u])
                copies.load(mScale.iterator + scale, rScale[u])
        for u in cutlass.range_constexpr(c.units):
            if unit[u] < units:
                words = self.read.values([self.word(rCodes[u])], Int32(rScale[u][0]), gs)
                x = mX.iterator + Int64(unit[u]) * CODES
                for i in cutlass.range_constexpr(0, len(words), 4):
                    rows.store_words(words[i : i + 4], x + i * (CODES // len(words)))

    def locate(
        self,
        unit: Int32,
        per_row: Int32,  # groups of codes
        reciprocal: tuple,  # of per_row
        sizes: tuple,  # of the batch axes after merging
        steps: tuple,  # strides of codes
        scale_steps: tuple,
        columns: Int32,  # of the 128x4 scales
        pitch: Int64,  # bytes from one of their rows to the next
    ):
        """The bytes before a group of codes, and before its scale."""
        if self.c.flat:
            return Int64(unit) * (CODES // 2), Int64(unit >> self.shift)
        row = rows.quotient(unit, reciprocal)
        column = unit - row * per_row
        codes = rows.offset(row, sizes, steps) + Int64(column) * (CODES // 2)
        k = column >> self.shift
        if not self.swizzled:
            return codes, rows.offset(row, sizes, scale_steps) + k
        tile = (row >> 7) * (columns >> 2) + (k >> 2)
        scale = Int64(tile) * 512 + ((row & 31) * 16 + ((row >> 5) & 3) * 4 + (k & 3))
        if not self.dense:
            scale = scale // columns * pitch + scale % columns
        return codes, scale

    def word(self, vectors: list[Any]) -> Int32:
        """Four bytes as one number."""
        if self.c.width == 4:
            return cute.recast_tensor(vectors[0], Int32)[0]
        word = Int32(0)
        for i in range(4):
            word = word | (Int32(vectors[i // self.c.width][i % self.c.width]) << (8 * i))
        return word


def trace(
    arch: str,
    format: str,
    dtype: str,
    rank: int,
    groups: int,
    swizzled: bool,
    dense: bool,
    global_scale: bool,
    config: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``groups`` is the number of batch axes after merging; ``dense``: 128x4 scales have no padding between rows."""
    c = Config(*config)
    steps = (Int64(0),) * groups
    arguments = [
        fake.tensor("u8", (None,) * rank, align=c.width),
        fake.tensor("u8", (None,) * (2 if swizzled else rank), align=1),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.tensor(dtype, (None,) * rank, align=16),
        Int32(0),
        (Int32(0), (Int64(0), Int32(0)), (Int32(0),) * groups, steps, steps, Int32(0), Int64(0)),
        fake.stream(),
    ]
    return _Dequantizer(format, dtype, swizzled, dense, c), arguments
