"""Operands of ``mma.py``: 16-bit elements as they lie in memory, or an fp8 (E4M3) KV cache dequantised in registers.

A step down a row is the 32 bytes of 16 keys that ``ldmatrix`` loads: 16 columns of 16-bit elements, or 32 of fp8. A
lane converts what it got to float16, exactly, by two ``cvt.rn.f16x2.e4m3x2``; nothing changes lanes. The order in which
columns enter a dot product is free, so a lane's four neighbouring fp8 values of a key are four columns of its own, and
Q is loaded in that order; of V a lane has two neighbouring columns where it has two that are 8 apart of 16 bits.

P is scaled by 2^15 before float16, so that small weights survive; bfloat16 queries by a power of two a head, so that
they fit float16. The scales of q and k go into the scores' scale, that of v into the output.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import e4m3
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.limits import traced
from torch_attnkit.cuda.smem import itemsize

from .arguments import Scalars, Tensors, descaled
from .config import Fp8KvConfig, MmaConfig
from .schedule import WorkTile

Fragment = tuple[Int32, ...]  # 16 x 16 elements, the left side of a product: four pairs a lane

# Probabilities are multiplied as float16 by 2^15, so that one of 2^-39 still counts: among 131072 keys those below
# 2^-25 can be 2^-8 of a row.
_P_SHIFT = 15
_Q_EXPONENT = 14  # of the largest element of a query in float16, whose largest is 15
_BIAS = 127  # of a float's exponent


def elements(config: MmaConfig) -> Elements16 | ElementsFp8:
    return ElementsFp8(config) if isinstance(config, Fp8KvConfig) else Elements16(config)


class Elements16:
    """Elements of 16 bits."""

    blocks = 1  # of 16 columns, of a step
    capped = None  # whether scores are; None: the launch says

    def __init__(self, config: MmaConfig):
        self.c, self.dtype = config, config.dtype

    def keys(self, words: Fragment) -> list[Fragment]:
        return [words]

    def values(self, words: Fragment) -> list[Fragment]:
        return [words]

    def pair(self, p0: Float32, p1: Float32) -> Int32:
        """Two probabilities for a product with V."""
        return op.pack(self.dtype, p0, p1)

    def column(self, block: int, half: int) -> Int32:
        """The column of V that this lane has of a block."""
        return block * 16 + cute.arch.lane_idx() // 4 + 8 * half

    @cute.jit
    def query(self, tensors: Tensors, tile: WorkTile, shared: Int32):
        """Q as the right side of a product; the heads that pad a group repeat its last."""
        c = self.c
        lane = cute.arch.lane_idx()
        rQ = _query_fragment(c, shared)
        for n in cutlass.range_constexpr(c.heads // 8):
            head = tile.head + cutlass.min(n * 8 + lane // 4, tile.heads - 1)
            row = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * c.itemsize
            row += Int64(tensors.q.stride[1]) * head * c.itemsize + (lane & 3) * 4
            for k in cutlass.range_constexpr(c.dim // 16):
                rQ[0, k, n] = op.load_pair(row + k * 32)
                rQ[1, k, n] = op.load_pair(row + k * 32 + 16)
        return rQ

    def factors(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, rQ: cute.Tensor) -> list[list[Float32]]:
        """Of the products of this lane's two heads of every eight."""
        return [[scalars.scale, scalars.scale] for _ in range(self.c.heads // 8)]

    def weight(self, tensors: Tensors, tile: WorkTile) -> Float32 | None:
        """What the output is to be multiplied by."""
        return None


class ElementsFp8:
    """E4M3 under scales; products are of float16, which has every E4M3 value and, scaled, bfloat16's queries."""

    blocks = 2
    dtype = cutlass.Float16

    def __init__(self, config: Fp8KvConfig):
        self.c, self.capped = config, config.capped

    def keys(self, words: Fragment) -> list[Fragment]:
        """Two blocks of columns, which ``ldmatrix`` loads one after the other, 8 keys and 8 more of each."""
        blocks = []
        for upper, lower in (words[:2], words[2:]):
            (a, c), (b, d) = _e4m3_to_f16(upper), _e4m3_to_f16(lower)
            blocks.append((a, b, c, d))
        return blocks

    def values(self, words: Fragment) -> list[Fragment]:
        """The same of V', whose words have two columns of a key and then of the next."""
        blocks = []
        for first, second in ((words[0], words[2]), (words[1], words[3])):
            blocks.append((*_e4m3_columns_to_f16(first), *_e4m3_columns_to_f16(second)))
        return blocks

    def pair(self, p0: Float32, p1: Float32) -> Int32:
        return op.pack(self.dtype, p0 * 2.0**_P_SHIFT, p1 * 2.0**_P_SHIFT)

    def column(self, block: int, half: int) -> Int32:
        return block * 16 + cute.arch.lane_idx() // 4 * 2 + half

    @cute.jit
    def query(self, tensors: Tensors, tile: WorkTile, shared: Int32):
        """Q in the order in which fp8 columns lie; bfloat16 becomes float16 in ``factors``."""
        c = self.c
        lane, size = cute.arch.lane_idx(), const_expr(itemsize(c.dtype))
        rQ = _query_fragment(c, shared)
        for n in cutlass.range_constexpr(c.heads // 8):
            head = tile.head + cutlass.min(n * 8 + lane // 4, tile.heads - 1)
            row = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * size
            row += Int64(tensors.q.stride[1]) * head * size + (lane & 3) * (4 * size)
            for k in cutlass.range_constexpr(c.dim // 16):
                if const_expr(size == 1):
                    first, second = _e4m3_to_f16(op.load_pair(row + k * 16))
                    rQ[0, k, n], rQ[1, k, n] = first, second
                else:
                    rQ[0, k, n] = op.load_pair(row + k * 32)
                    rQ[1, k, n] = op.load_pair(row + k * 32 + 4)
        return rQ

    @cute.jit
    def factors(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, rQ: cute.Tensor):
        """The scales of q and k, and of bfloat16 the power of two that is left where a head's row, whose largest
        element it brings to 2^14, is in float16: exact for elements down to 2^-31 of that."""
        c = self.c
        scale = descaled(tensors, slice(0, 2), tile, scalars.scale)
        factors = []
        for n in cutlass.range_constexpr(c.heads // 8):
            if const_expr(c.dtype is not cutlass.BFloat16):
                factors.append([scale, scale])
            else:
                exponent = _to_float16(rQ, n, c.dim // 16)
                own = []
                for x in cutlass.range_constexpr(2):
                    other = cute.arch.shuffle_sync(exponent, ((cute.arch.lane_idx() & 3) * 2 + x) * 4)
                    own.append(scale * _power_of_two(-other))
                factors.append(own)
        return factors

    def weight(self, tensors: Tensors, tile: WorkTile) -> Float32 | None:
        return descaled(tensors, slice(2, 3), tile, Float32(2.0**-_P_SHIFT))


def _query_fragment(c: MmaConfig, shared: Int32) -> cute.Tensor:
    """(2, D / 16, heads / 8) pairs, in registers where there is room for them."""
    if c.shared.query.nbytes == 0:
        return cute.make_rmem_tensor(cute.make_layout((2, c.dim // 16, c.heads // 8)), Int32)
    at = c.shared.query.at(shared) + cute.arch.warp_idx() * (c.shared.query.nbytes // c.warps)
    return cute.make_tensor(
        cute.make_ptr(Int32, at + cute.arch.lane_idx() * 8, cute.AddressSpace.smem, assumed_align=8),
        cute.make_layout((2, c.dim // 16, c.heads // 8), stride=(1, 64, 4 * c.dim)),
    )


@cute.jit
def _to_float16(rQ: cute.Tensor, n: cutlass.Constexpr, blocks: cutlass.Constexpr):
    """Head ``n * 8 + lane / 4`` of rQ from bfloat16 to float16, multiplied by a power of two, which is returned.

    An infinity or NaN makes the other elements small, which then do not matter, and stays what it is.
    """
    top = Int32(0)  # the largest element as the bits of a float
    for k in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(2):
            top = cutlass.max(top, rQ[i, k, n] & 0x7FFFFFFF)
            top = cutlass.max(top, (rQ[i, k, n] << 16) & 0x7FFFFFFF)
    for distance in cutlass.range_constexpr(2):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 1 << distance))
    # Both this power of two and its inverse are normal floats.
    exponent = cutlass.min(_Q_EXPONENT + _BIAS - (top >> 23), _BIAS - 1)
    by = _power_of_two(exponent)
    for k in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(2):
            low = Int32(rQ[i, k, n] << 16).bitcast(Float32)
            high = Int32(rQ[i, k, n] & -65536).bitcast(Float32)
            rQ[i, k, n] = op.pack(cutlass.Float16, low * by, high * by)
    return exponent


def _power_of_two(exponent: Int32) -> Float32:
    return Int32((exponent + _BIAS) << 23).bitcast(Float32)


@dsl_user_op
def _e4m3_to_f16(values: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Four E4M3 values as two pairs of float16, exactly; NaN stays NaN."""
    if not traced().e4m3:
        return e4m3.f16_pair(values), e4m3.f16_pair(values >> 16)
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    return asm([Int32, Int32], [values], text, loc=loc, ip=ip)


@dsl_user_op
def _e4m3_columns_to_f16(values: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """E4M3 (key 0, column 0), (0, 1), (1, 0), (1, 1) as pairs of float16: both keys of column 0, and of column 1."""
    if not traced().e4m3:
        columns = permute_bytes(values, values, Int32(0x3120))
        return e4m3.f16_pair(columns), e4m3.f16_pair(columns >> 16)
    text = (
        "{ .reg .b32 turned; .reg .b16 low, high; prmt.b32 turned, $2, $2, 0x3120; mov.b32 {low, high}, turned; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    return asm([Int32, Int32], [values], text, loc=loc, ip=ip)
