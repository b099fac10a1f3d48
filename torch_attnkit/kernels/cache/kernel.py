"""Kernels on cache rows, a row per warp: dense copy both ways, quantising write, dequantising gather.

    _DenseRows    vectors of a row -> rounded to the other dtype; all loads of an iteration before the first store
    RowEncoder    16 channels a lane -> no-RoPE: amax of the block (1, 2 or 4 lanes) -> scale byte, codes
                                     -> RoPE: bfloat16
    _RowDecoder   codes of 16 channels and their scale byte -> values, rounded; RoPE channels in bfloat16 -> rounded

The slot is loaded beside the row, and only stores wait for it. Rows without a valid slot are not written; gathered they
are zeros.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import copies, e4m3, fake, fp4
from torch_attnkit.cuda.fp4_blocks import Quantizer, amax_of, floats_of
from torch_attnkit.cuda.warp_ops import pack
from torch_attnkit.kernels.fp4.rows import pieces, store_byte

from .decoder import Decoder
from .plan import CELL, LANES, Config
from .problem import Row


@cute.jit
def row_of_warp(mSlot: cute.Tensor, mCache: cute.Tensor, warps: int):
    """(row of this warp, whether there is one, its slot, whether that is valid)."""
    block, _, _ = cute.arch.block_idx()
    row = Int64(block) * warps + cute.arch.warp_idx()
    inside = row < mSlot.shape[0]
    slot = Int64(-1)
    if inside:
        slot = Int64(copies.scalar(mSlot.iterator + row))
    return row, inside, slot, (slot >= 0) & (slot < mCache.shape[0])


def ctas(mSlot: cute.Tensor, warps: int) -> Any:
    """CTAs of a launch, a row for each of their ``warps``."""
    return (mSlot.shape[0] + (warps - 1)) // warps


def zeros(count: int, dtype: Any) -> Any:
    fragment = cute.make_rmem_tensor(count, dtype)
    fragment.fill(0)
    return fragment


def words_of(fragment: Any) -> list[Any]:
    """A fragment as 32-bit words."""
    words = cute.recast_tensor(fragment, Int32)
    return [words[i] for i in range(cute.size(words))]


def fragment_of(words: list[Any], dtype: Any = Uint8) -> Any:
    """32-bit words as a fragment of another dtype."""
    held = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        held[i] = word
    return cute.recast_tensor(held, dtype)


@cute.jit
def load_part(pointer: Any, fragment: Any, count: int, first: Int32, end: int):
    """Load from element ``first`` on, ``count`` at a time, up to ``end``."""
    whole = const_expr(end % cute.size(fragment) == 0)  # so that no fragment is there in part
    if first < end:
        for i, piece in enumerate(pieces(fragment, count)):
            if whole or first + i * count < end:
                copies.load(pointer + (first + i * count), piece)


@cute.jit
def store_part(fragment: Any, pointer: Any, count: int, first: Int32, end: int):
    """Store likewise."""
    whole = const_expr(end % cute.size(fragment) == 0)
    if first < end:
        for i, piece in enumerate(pieces(fragment, count)):
            if whole or first + i * count < end:
                copies.store(piece, pointer + (first + i * count))


class _DenseRows:
    def __init__(self, gather: bool, head_dim: int, config: Config):
        self.gather, self.head_dim, self.c = gather, head_dim, config

    @cute.jit
    def __call__(
        self,
        mNumbers: cute.Tensor,  # (R, D)
        mCache: cute.Tensor,  # (Nc, D)
        mSlot: cute.Tensor,  # (R,)
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        self.kernel(mNumbers, mCache, mSlot).launch(
            grid=(ctas(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mDense: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor):
        c, end = self.c, const_expr(self.head_dim)
        row, inside, slot, found = row_of_warp(mSlot, mCache, c.warps)
        dense = mDense.iterator + row * mDense.stride[0]
        cached = mCache.iterator + slot * mCache.stride[0]
        source, readable, target, writable = dense, inside, cached, found
        dtype, out_dtype = mDense.element_type, mCache.element_type
        if const_expr(self.gather):
            source, readable, target, writable = cached, found, dense, inside
            dtype, out_dtype = out_dtype, dtype
        step = const_expr(LANES * c.width)
        for first in cutlass.range(cute.arch.lane_idx() * c.width, end, step * c.vectors, unroll=1):
            rX = [zeros(c.width, dtype) for _ in range(c.vectors)]
            for v in cutlass.range_constexpr(c.vectors):
                if readable and first + v * step < end:
                    copies.load(source + (first + v * step), rX[v])
            for v in cutlass.range_constexpr(c.vectors):
                if writable and first + v * step < end:
                    rO = cute.make_rmem_tensor(c.width, out_dtype)
                    rO.store(rX[v].load().to(out_dtype))
                    copies.store(rO, target + (first + v * step))


def trace_plain(
    arch: str, gather: bool, row: tuple[str, int, int], dtypes: tuple[str, str, str], config: tuple[int, ...]
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of dense rows, cache and slots."""
    c, head_dim = Config(*config), row[1]
    tensors = [fake.tensor(d, (None, head_dim), align=min(16, c.width * fake.dtype(d).width // 8)) for d in dtypes[:2]]
    slot = fake.tensor(dtypes[2], (None,), align=4)
    return _DenseRows(gather, head_dim, c), [*tensors, slot, fake.stream()]


class RowEncoder:
    def __init__(self, row: Row, config: Config):
        self.row, self.layout, self.c = row, row.layout, config
        self.lanes = row.block // CELL  # of a block
        self.bits = 8 if row.format == "fp8" else 4  # of a code
        self.quantize = Quantizer(row.format, lanes=self.lanes)

    @cute.jit
    def __call__(
        self,
        mNumbers: cute.Tensor,  # (R, D)
        mCache: cute.Tensor,  # (Nc, Rb)
        mSlot: cute.Tensor,  # (R,)
        mGlobal: cute.Tensor | None,  # ()
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        self.kernel(mNumbers, mCache, mSlot, mGlobal).launch(
            grid=(ctas(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mDense: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mGlobal: cute.Tensor | None):
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.layout
        lane = cute.arch.lane_idx()
        row, inside, slot, found = row_of_warp(mSlot, mCache, c.warps)
        source = mDense.iterator + row * mDense.stride[0]
        target = mCache.iterator + slot * mCache.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        for iteration in cutlass.range(-(-dim // (LANES * CELL)), unroll=1):
            first = (iteration * LANES + lane) * CELL
            rX = zeros(CELL, mDense.element_type)
            if inside:
                load_part(source, rX, c.width, first, dim)
            if const_expr(nope > 0):
                codes, byte = self.encoded(rX, gs)
                if found and first < nope:
                    store_part(codes, target, c.codes, first * self.bits // 8, layout.rope)
                    if (first // CELL) % self.lanes == 0:
                        store_byte(byte, target + (layout.scales + first // self.row.block))
            if const_expr(nope < dim):
                if found and first >= nope:
                    store_part(self.rounded(rX), target + layout.rope, c.rope, 2 * (first - nope), 2 * (dim - nope))
        if found and lane < layout.size - layout.end:
            store_byte(Int32(0), target + (layout.end + lane))

    def encoded(self, rX: Any, gs: Any) -> tuple[Any, Any]:
        """(bytes of a cell's codes, scale byte of its block)."""
        dtype = rX.element_type
        x, pairs = floats_of([rX])
        if self.row.format != "fp8":
            codes, byte = self.quantize(x, pairs, dtype, gs)
            return cute.recast_tensor(codes, Uint8), byte
        top, _ = amax_of(x, pairs, dtype, self.lanes)
        byte, _ = fp4.mxfp8_scale(top)
        r = fp4.ue8m0_reciprocal(byte)
        scaled = [fp4.times(number, r) for number in x]
        return fragment_of([e4m3.pack(scaled[i : i + 4]) for i in range(0, CELL, 4)]), byte

    def rounded(self, rX: Any) -> Any:
        """Bytes of a cell in bfloat16: bfloat16 inputs bit for bit, NaN payloads, too."""
        if rX.element_type is BFloat16:
            return cute.recast_tensor(rX, Uint8)
        x, _ = floats_of([rX])
        return fragment_of([pack(BFloat16, x[i], x[i + 1]) for i in range(0, CELL, 2)])


def trace_write(
    arch: str, row: tuple[str, int, int], dtypes: tuple[str, str, str], global_scale: bool, align: int, config: Any
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of dense rows, cache and slots; cache rows are aligned to
    ``align`` bytes."""
    c, r = Config(*config), Row(*row)
    arguments = [
        fake.tensor(dtypes[0], (None, r.head_dim), align=c.width * fake.dtype(dtypes[0]).width // 8),
        fake.tensor("u8", (None, r.layout.size), align=align),
        fake.tensor(dtypes[2], (None,), align=4),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.stream(),
    ]
    return RowEncoder(r, c), arguments


class _RowDecoder:
    def __init__(self, row: Row, dtype: Any, config: Config):
        self.row, self.layout, self.dtype, self.c = row, row.layout, dtype, config
        self.decoder = Decoder(row, dtype)

    @cute.jit
    def __call__(
        self,
        mNumbers: cute.Tensor,  # (R, D), contiguous
        mCache: cute.Tensor,  # (Nc, Rb)
        mSlot: cute.Tensor,  # (R,)
        mGlobal: cute.Tensor | None,  # ()
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        self.kernel(mNumbers, mCache, mSlot, mGlobal).launch(
            grid=(ctas(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mDense: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mGlobal: cute.Tensor | None):
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.layout
        bits = const_expr(self.decoder.bits)
        row, inside, slot, found = row_of_warp(mSlot, mCache, c.warps)
        source = mCache.iterator + slot * mCache.stride[0]
        target = mDense.iterator + row * mDense.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = self.decoder.divisor(copies.scalar(mGlobal.iterator))
        for iteration in cutlass.range(-(-dim // (LANES * CELL)), unroll=1):
            first = (iteration * LANES + cute.arch.lane_idx()) * CELL
            rCodes, rScale, rRope = (zeros(n, Uint8) for n in (CELL * bits // 8, 1, 2 * CELL))
            if found:
                if first < nope:
                    load_part(source, rCodes, c.codes, first * bits // 8, layout.rope)
                    copies.load(source + (layout.scales + first // self.row.block), rScale)
                else:
                    load_part(source + layout.rope, rRope, c.rope, 2 * (first - nope), 2 * (dim - nope))
            words = self.decoder.rope(words_of(rRope))
            if const_expr(nope > 0):
                decoded = self.decoder.nope(words_of(rCodes), Int32(rScale[0]), gs)
                words = [cutlass.select_(first < nope, d, w) for d, w in zip(decoded, words, strict=True)]
            if inside:
                store_part(fragment_of(words, self.dtype), target, c.width, first, dim)


def trace_gather(
    arch: str, row: tuple[str, int, int], dtypes: tuple[str, str, str], global_scale: bool, align: int, config: Any
) -> tuple[Any, list[Any]]:
    """Arguments as ``trace_write``'s."""
    c, r = Config(*config), Row(*row)
    arguments = [
        fake.tensor(dtypes[0], (None, r.head_dim), align=min(16, c.width * fake.dtype(dtypes[0]).width // 8)),
        fake.tensor("u8", (None, r.layout.size), align=align),
        fake.tensor(dtypes[2], (None,), align=4),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.stream(),
    ]
    return _RowDecoder(r, fake.dtype(dtypes[0]), c), arguments
