"""Device side of kv_cache_write for encoded rows: numbers to codes, RoPE channels and scales of a row of the cache.

    lane: 16 channels -> registers -> NoPE: amax of the block (1, 2 or 4 lanes) -> scale byte, its reciprocal -> codes
                                   -> RoPE: bfloat16

The slot is on its way while the numbers are, and only the stores wait for it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint8, const_expr

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda.fp4_blocks import Quantizer, amax_of, numbers_of
from torch_attnkit.cuda.warp_ops import pack, pack_e4m3
from torch_attnkit.kernels.fp4.rows import store_byte

from . import rows
from .plan import CELL, LANES, Config
from .problem import Row


class _Writer:
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
            grid=(rows.blocks(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mNumbers: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mGlobal: cute.Tensor | None):
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.layout
        lane = cute.arch.lane_idx()
        row, inside, slot, found = rows.of_warp(mSlot, mCache, c.warps)
        source = mNumbers.iterator + row * mNumbers.stride[0]
        target = mCache.iterator + slot * mCache.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        for turn in cutlass.range(-(-dim // (LANES * CELL)), unroll=1):
            first = (turn * LANES + lane) * CELL
            rX = rows.zeros(CELL, mNumbers.element_type)
            if inside:
                rows.load(source, rX, c.width, first, dim)
            if const_expr(nope > 0):
                codes, byte = self.encoded(rX, gs)
                if found and first < nope:
                    rows.store(codes, target, c.codes, first * self.bits // 8, layout.rope)
                    if (first // CELL) % self.lanes == 0:
                        store_byte(byte, target + (layout.scales + first // self.row.block))
            if const_expr(nope < dim):
                if found and first >= nope:
                    rows.store(self.rounded(rX), target + layout.rope, c.rope, 2 * (first - nope), 2 * (dim - nope))
        if found and lane < layout.size - layout.end:
            store_byte(Int32(0), target + (layout.end + lane))

    def encoded(self, rX: Any, gs: Any) -> tuple[Any, Any]:
        """The bytes of a cell's codes, and the scale byte of its block."""
        dtype = rX.element_type
        x, pairs = numbers_of([rX])
        if self.row.format != "fp8":
            codes, byte = self.quantize(x, pairs, dtype, gs)
            return cute.recast_tensor(codes, Uint8), byte
        top, _ = amax_of(x, pairs, dtype, self.lanes)
        byte, _ = fp4.mxfp8_scale(top)
        r = fp4.ue8m0_reciprocal(byte)
        scaled = [fp4.times(number, r) for number in x]
        return rows.fragment_of([pack_e4m3(scaled[i : i + 4]) for i in range(0, CELL, 4)]), byte

    def rounded(self, rX: Any) -> Any:
        """The bytes of a cell in bfloat16: of what is bfloat16 every bit, of a NaN, too."""
        if rX.element_type is BFloat16:
            return cute.recast_tensor(rX, Uint8)
        x, _ = numbers_of([rX])
        return rows.fragment_of([pack(BFloat16, x[i], x[i + 1]) for i in range(0, CELL, 2)])


def trace(
    arch: str, row: tuple[str, int, int], dtypes: tuple[str, str, str], global_scale: bool, align: int, config: Any
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of the numbers, of the cache and of the slots; rows of the cache
    start at multiples of ``align`` bytes."""
    c, r = Config(*config), Row(*row)
    arguments = [
        fake.tensor(dtypes[0], (None, r.head_dim), align=c.width * fake.dtype(dtypes[0]).width // 8),
        fake.tensor("u8", (None, r.layout.size), align=align),
        fake.tensor(dtypes[2], (None,), align=4),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.stream(),
    ]
    return _Writer(r, c), arguments
