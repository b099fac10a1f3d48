"""Inverse RoPE, then quantise to FP4: heads rotated back to position 0, to packed E2M1 and a scale a block.

    thread: block of o -> registers -> (RoPE: rotated by its token's angles, rounded) -> amax -> codes, scale byte

Only the last blocks of a head are rotated. With linear scales the blocks of ``section`` heads are numbered so that the
rotated ones come last and no warp has both kinds; in the 128x4 layout the threads are numbered as the bytes of the
scales are, padding included, and the four columns of a tile are of one kind in all heads of 4 n unrotated blocks.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies, fake, rope
from torch_attnkit.cuda.fp4_blocks import Quantizer, floats_of

from . import rows
from .plan import TILE, Rotation
from .problem import BLOCK


class _RopeQuantizer:
    def __init__(self, format: str, head_dim: int, pairs: int, swizzled: bool, rotation: Rotation):
        self.quantize, self.block = Quantizer(format), BLOCK[format]
        self.kb = head_dim // self.block  # blocks of a head
        self.rotated = -(-2 * pairs // self.block)  # of these are rotated, the last ones
        self.still = self.rotated * self.block // 2 - pairs  # pairs of the first of them that are not
        self.swizzled, self.c = swizzled, rotation

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (Tq, Hq, D)
        mCos: cute.Tensor,  # (Tq, R2)
        mSin: cute.Tensor,  # (Tq, R2)
        mGlobal: cute.Tensor | None,  # ()
        mCodes: cute.Tensor,  # (Tq, Hq, D/2), contiguous
        mScale: cute.Tensor,  # (Tq, Hq, D/block) or (groups, padded Tq, padded columns), contiguous
        units: Int32,  # scales, those of sections or of tiles that are not whole included
        divisors: tuple,  # (heads,) or (columns of tiles, tiles of a group): their reciprocals
        stream: cuda.CUstream,
    ):
        share = const_expr(self.c.threads * self.c.units)
        self.kernel(mO, mCos, mSin, mGlobal, mCodes, mScale, units, divisors).launch(
            grid=((units + (share - 1)) // share, 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mCos: cute.Tensor,
        mSin: cute.Tensor,
        mGlobal: cute.Tensor | None,
        mCodes: cute.Tensor,
        mScale: cute.Tensor,
        units: Int32,
        divisors: tuple,
    ):
        c, block, half = self.c, const_expr(self.block), const_expr(self.block // 2)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        first = [(cta * c.units + u) * c.threads for u in range(c.units)]
        located = [self.locate(f, tid, mO, mScale, divisors) for f in first]
        rX = copies.fragments(c.units, block, mO.element_type)
        rCos, rSin = (copies.fragments(c.units, half, m.element_type) for m in (mCos, mSin))
        for u in cutlass.range_constexpr(c.units):
            inside, before, token, _, k = located[u]
            if inside:
                rows.load(mO.iterator + before, rows.pieces(rX[u], c.width))
                if const_expr(self.rotated > 0):
                    if k >= self.kb - self.rotated:
                        pair = (k - (self.kb - self.rotated)) * half - self.still
                        self.angles(mCos, token, pair, rCos[u])
                        self.angles(mSin, token, pair, rSin[u])
        for u in cutlass.range_constexpr(c.units):
            inside, _, _, at, k = located[u]
            scale = mScale.iterator + (first[u] + tid)
            if inside:
                if const_expr(self.rotated > 0):
                    if k >= self.kb - self.rotated:
                        cos, sin = ([r[u][i].to(Float32) for i in range(half)] for r in (rCos, rSin))
                        still = self.still
                        if const_expr(still > 0):
                            still = still - (k - (self.kb - self.rotated)) * half
                        rope.rotate_back(rX[u], cos, sin, still)
                x, pairs = floats_of([rX[u]])
                codes, byte = self.quantize(x, pairs, mO.element_type, gs)
                words = [codes[i] for i in range(block // 8)]
                rows.store_words(words, mCodes.iterator + Int64(at) * half)
                if const_expr(not self.swizzled):
                    scale = mScale.iterator + at
                rows.store_byte(byte, scale)
            if const_expr(self.swizzled):
                if not inside and first[u] + tid < units:
                    rows.store_byte(Int32(0), scale)

    def locate(self, first: Int32, tid: Int32, mO: Any, mScale: Any, divisors: tuple) -> tuple[Any, ...]:
        """Of unit ``first + tid``: whether it is a block, the elements of o before it, its token, the block's number,
        and that in its head."""
        kb, tokens, heads = self.kb, Int32(mO.shape[0]), Int32(mO.shape[1])
        if self.swizzled:
            columns, tiles = divisors
            wide = Int32(mScale.shape[2]) >> 2
            tile, byte = first // TILE, first % TILE + tid
            group = rows.quotient(tile, tiles)
            tile = tile - group * wide * (Int32(mScale.shape[1]) >> 7)
            tile_row = rows.quotient(tile, columns)
            token = tile_row * 128 + (byte >> 4) + ((byte >> 2) & 3) * 32
            column = (tile - tile_row * wide) * 4 + (byte & 3)
            of_group = heads // Int32(mScale.shape[0])
            head, k = group * of_group + column // kb, column % kb
            inside, row = (token < tokens) & (column < of_group * kb), token * heads + head
        else:
            row, k = self.numbered(first + tid)
            inside, token = row < tokens * heads, rows.quotient(row, divisors[0])
            head = row - token * heads
        at = row * kb + k
        if self.c.flat:
            return inside, Int64(at) * self.block, token, at, k
        return inside, Int64(token) * mO.stride[0] + Int64(head) * mO.stride[1] + k * self.block, token, at, k

    def numbered(self, unit: Int32) -> tuple[Any, Any]:
        """The row of heads of a unit and its number in the head, where the rotated blocks of a section come last."""
        kb, section, still = self.kb, self.c.section, self.kb - self.rotated
        unit = Uint32(unit)  # whose quotients need no correction of signs
        row, j = unit // (section * kb) * section, unit % (section * kb)
        if self.rotated == 0 or still == 0:
            return Int32(row + j // kb), Int32(j % kb)
        last = j - section * still
        rotated = j >= section * still
        row = row + cutlass.select_(rotated, last // self.rotated, j // still)
        return Int32(row), Int32(cutlass.select_(rotated, still + last % self.rotated, j % still))

    @cute.jit
    def angles(self, mAngle: cute.Tensor, token: Int32, pair: Int32, fragment: Any):
        """The cosines or sines of a block's pairs, which start at ``pair``: those before 0 are of no pair."""
        angles = mAngle.iterator + Int64(token) * mAngle.stride[0]
        for i, piece in enumerate(rows.pieces(fragment, self.c.angles)):
            at = pair + i * self.c.angles
            if const_expr(self.still == 0):
                copies.load(angles + at, piece)
            else:
                piece.fill(0)
                if at >= 0:
                    copies.load(angles + at, piece)


def trace(
    arch: str,
    format: str,
    dtypes: tuple[str, str],
    sizes: tuple[int, int],
    swizzled: bool,
    global_scale: bool,
    rotation: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``dtypes`` of o and of the angles; ``sizes``: D and R2."""
    c, (head_dim, pairs) = Rotation(*rotation), sizes
    tokens = fake.dim()
    align = c.angles * fake.dtype(dtypes[1]).width // 8
    divisor = (Int64(0), Int32(0))
    arguments = [
        fake.tensor(dtypes[0], (tokens, None, head_dim), align=c.width * fake.dtype(dtypes[0]).width // 8),
        *(fake.tensor(dtypes[1], (tokens, None), align=align) for _ in range(2)),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.tensor("u8", (None,) * 3, align=16),
        fake.tensor("u8", (None,) * 3, align=16),
        Int32(0),
        (divisor, divisor) if swizzled else (divisor,),
        fake.stream(),
    ]
    return _RopeQuantizer(format, head_dim, pairs, swizzled, c), arguments
