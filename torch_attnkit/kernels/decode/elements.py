"""How ``mma.py`` has elements as operands of its products: 16-bit ones as they lie in memory, E4M3 as float16.

A step down a row is the 32 bytes that ``ldmatrix`` brings of 16 keys: a block of 16 columns of 16-bit elements, or two
blocks of codes. A lane decodes what it got and moves nothing to other lanes: the order in which columns enter a sum is
free, so a lane's four neighbouring codes of a key are four columns of its own, those that it has of Q, too; and of V's
columns a lane has two neighbours where it has two that are 8 apart of 16-bit elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import fake
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.smem import itemsize

from .arguments import Scalars, Tensors, arguments
from .codes import CodesConfig
from .config import MmaConfig
from .schedule import WorkTile

Fragment = tuple[Int32, ...]  # 16 x 16 elements, the left side of a product: four pairs a lane

# Probabilities are multiplied as float16 by 2^15, so that one of 2^-39 still counts: among 131072 keys those below
# 2^-25 can be 2^-8 of a row.
_RAISED = 15
_TOP = 14  # the power of two that the largest element of a query gets in float16, whose largest is 15
_BIAS = 127  # of a float's exponent


def elements(config: MmaConfig) -> Plain | Codes:
    return Codes(config) if isinstance(config, CodesConfig) else Plain(config)


class _Caches(NamedTuple):
    """Of a config what decides the types of a kernel's arguments, as if q were E4M3, too."""

    dtype: Any
    dim: int
    dim_v: int
    page: int


def over_codes(dtype: str, config: CodesConfig, size: Callable[[], Any]) -> list[Any]:
    """Stand-ins for what the host passes, see ``arguments``: caches of E4M3, q of ``dtype``."""
    caches = _Caches(cutlass.Float8E4M3FN, config.dim, config.dim_v, config.page)
    tensors, *rest = arguments("f8e4m3", caches, size, config.scales)
    if dtype != "f8e4m3":
        rows, word = tensors.lse.shape, 32 // config.dtype.width  # (B, Hq), and elements of 4 bytes
        q = fake.tensor(dtype, (*rows, config.dim), (fake.dim(word), fake.dim(word), 1), align=4)
        out = fake.tensor(dtype, (*rows, config.dim_v), (fake.dim(8), fake.dim(8), 1))
        tensors = tensors._replace(q=q, out=out)
    return [tensors, *rest]


class Plain:
    """Elements of 16 bits."""

    blocks = 1  # of a step
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
        rQ = _place_of_query(c, shared)
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


class Codes:
    """E4M3 codes under scales; the products are of float16, which has every code and, scaled, bfloat16's queries."""

    blocks = 2
    dtype = cutlass.Float16

    def __init__(self, config: CodesConfig):
        self.c, self.capped = config, config.capped

    def keys(self, words: Fragment) -> list[Fragment]:
        """Two blocks of columns, which ``ldmatrix`` brings one after the other, 8 keys and 8 more of each."""
        found = []
        for upper, lower in (words[:2], words[2:]):
            (a, c), (b, d) = _halves(upper), _halves(lower)
            found.append((a, b, c, d))
        return found

    def values(self, words: Fragment) -> list[Fragment]:
        """The same of V', whose words have two columns of a key and then of the next."""
        found = []
        for first, second in ((words[0], words[2]), (words[1], words[3])):
            found.append((*_columns(first), *_columns(second)))
        return found

    def pair(self, p0: Float32, p1: Float32) -> Int32:
        return op.pack(self.dtype, p0 * 2.0**_RAISED, p1 * 2.0**_RAISED)

    def column(self, block: int, half: int) -> Int32:
        return block * 16 + cute.arch.lane_idx() // 4 * 2 + half

    @cute.jit
    def query(self, tensors: Tensors, tile: WorkTile, shared: Int32):
        """Q in the order in which codes come, as it is: bfloat16 becomes float16 in ``factors``."""
        c = self.c
        lane, size = cute.arch.lane_idx(), const_expr(itemsize(c.dtype))
        rQ = _place_of_query(c, shared)
        for n in cutlass.range_constexpr(c.heads // 8):
            head = tile.head + cutlass.min(n * 8 + lane // 4, tile.heads - 1)
            row = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * size
            row += Int64(tensors.q.stride[1]) * head * size + (lane & 3) * (4 * size)
            for k in cutlass.range_constexpr(c.dim // 16):
                if const_expr(size == 1):
                    first, second = _halves(op.load_pair(row + k * 16))
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
        scale = _scaled(tensors, slice(0, 2), tile, scalars.scale)
        found = []
        for n in cutlass.range_constexpr(c.heads // 8):
            if const_expr(c.dtype is not cutlass.BFloat16):
                found.append([scale, scale])
            else:
                exponent = _to_float16(rQ, n, c.dim // 16)
                mine = []
                for x in cutlass.range_constexpr(2):
                    other = cute.arch.shuffle_sync(exponent, ((cute.arch.lane_idx() & 3) * 2 + x) * 4)
                    mine.append(scale * _power_of_two(-other))
                found.append(mine)
        return found

    def weight(self, tensors: Tensors, tile: WorkTile) -> Float32 | None:
        return _scaled(tensors, slice(2, 3), tile, Float32(2.0**-_RAISED))


def _place_of_query(c: MmaConfig, shared: Int32) -> cute.Tensor:
    """(2, D / 16, heads / 8) pairs, in registers where there is room for them."""
    if c.shared.query.nbytes == 0:
        return cute.make_rmem_tensor(cute.make_layout((2, c.dim // 16, c.heads // 8)), Int32)
    at = c.shared.query.at(shared) + cute.arch.warp_idx() * (c.shared.query.nbytes // c.warps)
    return cute.make_tensor(
        cute.make_ptr(Int32, at + cute.arch.lane_idx() * 8, cute.AddressSpace.smem, assumed_align=8),
        cute.make_layout((2, c.dim // 16, c.heads // 8), stride=(1, 64, 4 * c.dim)),
    )


def _scaled(tensors: Tensors, which: slice, tile: WorkTile, factor: Float32) -> Float32:
    """``factor`` times a sequence's and KV head's entries of those of the scales of q, k and v that there are."""
    for scale in tensors.scales[which] if tensors.scales else ():
        if scale is not None:
            factor = factor * scale[tile.b, tile.kv_head]
    return factor


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
    exponent = cutlass.min(_TOP + _BIAS - (top >> 23), _BIAS - 1)
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
def _halves(codes: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Four E4M3 codes as two pairs of float16, exactly; NaN stays NaN."""
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    return asm([Int32, Int32], [codes], text, loc=loc, ip=ip)


@dsl_user_op
def _columns(codes: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Codes (key 0, column 0), (0, 1), (1, 0), (1, 1) as pairs of float16: both keys of column 0, and of column 1."""
    text = (
        "{ .reg .b32 turned; .reg .b16 low, high; prmt.b32 turned, $2, $2, 0x3120; mov.b32 {low, high}, turned; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    return asm([Int32, Int32], [codes], text, loc=loc, ip=ip)
