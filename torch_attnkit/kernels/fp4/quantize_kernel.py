"""Device side of the quantisers: rows of numbers to E2M1 codes and a scale per block.

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
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, fp4

from . import rows
from .plan import TILE, Config
from .problem import BLOCK


class _Quantizer:
    def __init__(self, format: str, swizzled: bool, floor: bool, config: Config):
        self.nvfp4, self.block = format == "nvfp4", BLOCK[format]
        self.swizzled, self.floor, self.c = swizzled, floor, config

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
        places = [self.place(f, tid, units, rows_, kb, reciprocal, sizes, steps) for f in first]
        for u in cutlass.range_constexpr(c.units):
            inside, _, before = places[u]
            if inside:
                rows.load(mX.iterator + before, rX[u])
        for u in cutlass.range_constexpr(c.units):
            inside, at, _ = places[u]
            scale = mScale.iterator + (first[u] + tid)
            if inside:
                codes, byte = self.quantized(rX[u], gs)
                rows.store_words([codes[i] for i in range(block // 8)], mCodes.iterator + Int64(at) * (block // 2))
                rows.store_byte(byte, scale)
            if const_expr(self.swizzled):
                if not inside and first[u] + tid < units:
                    rows.store_byte(Int32(0), scale)

    def place(
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

    @cute.jit
    def quantized(self, vectors: list[Any], gs: Any):
        """The codes of a block, eight a word, and its scale byte."""
        dtype = vectors[0].element_type
        if const_expr(dtype is Float32 or self.c.width == 1):
            x = [vector[e].to(Float32) for vector in vectors for e in range(self.c.width)]
            top = fp4.amax_or_nan(x)
        else:
            words = [cute.recast_tensor(vector, Int32) for vector in vectors]
            pairs = [word[i] for word in words for i in range(self.c.width // 2)]
            x = [number for pair in pairs for number in fp4.floats(dtype, pair)]
            top = fp4.amax_or_nan_of_pairs(dtype, pairs)
        whole = top == top
        if not whole:
            top = fp4.amax(x)
        if const_expr(self.nvfp4):
            byte, scale = fp4.nvfp4_scale(top, gs)
            r = fp4.nvfp4_factor(scale, gs)
        else:
            byte, _ = fp4.mxfp4_scale(top, self.floor)
            r = fp4.ue8m0_reciprocal(byte)
        codes = cute.make_rmem_tensor(self.block // 8, Int32)
        # Nearly every block is bounded, unless the scale is rounded down. Nothing is lost to the others but time.
        if const_expr(self.floor):
            self.encode(codes, x, r, False)
        else:
            if whole and fp4.times(top, r) < Float32(7):
                self.encode(codes, x, r, True)
            else:
                self.encode(codes, x, r, False)
        return codes, byte

    def encode(self, codes: Any, x: list[Any], r: Any, bounded: bool) -> None:
        for i in range(self.block // 8):
            codes[i] = fp4.e2m1_codes(x[8 * i : 8 * i + 8], r, bounded)


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
