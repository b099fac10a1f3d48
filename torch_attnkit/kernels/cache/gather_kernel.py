"""Device side of kv_cache_gather for encoded rows: codes, RoPE channels and scales of a row of the cache to numbers.

    lane: slot -> codes of 16 NoPE channels, their scale byte -> numbers, rounded
               -> 16 RoPE channels of bfloat16 -> rounded

A row without a slot in the cache reads nothing and gives what zeros give, zeros.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, const_expr

from torch_attnkit.cuda import copies, fake

from . import rows
from .decoder import Decoder
from .plan import CELL, LANES, Config
from .problem import Row


class _Gatherer:
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
            grid=(rows.blocks(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mNumbers: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mGlobal: cute.Tensor | None):
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.layout
        bits = const_expr(self.decoder.bits)
        row, inside, slot, found = rows.of_warp(mSlot, mCache, c.warps)
        source = mCache.iterator + slot * mCache.stride[0]
        target = mNumbers.iterator + row * mNumbers.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = self.decoder.divisor(copies.scalar(mGlobal.iterator))
        for turn in cutlass.range(-(-dim // (LANES * CELL)), unroll=1):
            first = (turn * LANES + cute.arch.lane_idx()) * CELL
            rCodes, rScale, rRope = (rows.zeros(n, Uint8) for n in (CELL * bits // 8, 1, 2 * CELL))
            if found:
                if first < nope:
                    rows.load(source, rCodes, c.codes, first * bits // 8, layout.rope)
                    copies.load(source + (layout.scales + first // self.row.block), rScale)
                else:
                    rows.load(source + layout.rope, rRope, c.rope, 2 * (first - nope), 2 * (dim - nope))
            words = self.decoder.rope(rows.words_of(rRope))
            if const_expr(nope > 0):
                decoded = self.decoder.nope(rows.words_of(rCodes), Int32(rScale[0]), gs)
                words = [cutlass.select_(first < nope, d, w) for d, w in zip(decoded, words, strict=True)]
            if inside:
                rows.store(rows.fragment_of(words, self.dtype), target, c.width, first, dim)


def trace(
    arch: str, row: tuple[str, int, int], dtypes: tuple[str, str, str], global_scale: bool, align: int, config: Any
) -> tuple[Any, list[Any]]:
    """As the writer's."""
    c, r = Config(*config), Row(*row)
    arguments = [
        fake.tensor(dtypes[0], (None, r.head_dim), align=min(16, c.width * fake.dtype(dtypes[0]).width // 8)),
        fake.tensor("u8", (None, r.layout.size), align=align),
        fake.tensor(dtypes[2], (None,), align=4),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.stream(),
    ]
    return _Gatherer(r, fake.dtype(dtypes[0]), c), arguments
