"""Keys from global memory to the register operand of ``wgmma``, dequantised on the way.

A K step takes 32 bytes of a row: lane q of a quad has words q and q + 4. Lanes load 16 bytes each instead and transpose
among themselves, so rows need not be contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, l2
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90.softmax import transpose_quads

from ..arguments import Tensors, find

QUAD = 4  # lanes that share a row
_BYTES = 16  # of a row that a lane loads at a time
_SIGNS = -0x7F7F7F80  # of four E4M3 codes
_TWO_TO_126 = 0x7E807E80  # two bf16


@dataclass
class Keys(Fixed):
    """A lane's 64 keys: the A operand, and the absolute scales of its two rows."""

    rA: cute.Tensor
    scales: list[Float32]


@dataclass
class Row:
    """A lane's part of a row."""

    parts: list[cute.Tensor]  # 16 bytes each
    scale: Float32
    factors: list[Int32]


@cute.jit
def load(c: cutlass.Constexpr, t: Tensors, mma: cute.TiledMma, request: Int32, first: Int32, longest: Int32):
    """A operands of a warpgroup; this lane's rows are ``first``, ``first`` + 8, and likewise from 64 on; zeros from
    ``longest`` on. All loads are issued before the first use."""
    rows = const_expr([64 * i + 8 * r for i in range(c.tiles) for r in range(2)])
    loaded = [_row(c, t, request, first + row, longest) for row in rows]
    return [operand(c, mma, loaded[2 * i : 2 * i + 2]) for i in range(c.tiles)]


@cute.jit
def _row(c: cutlass.Constexpr, t: Tensors, request: Int32, row: Int32, longest: Int32):
    lane = cute.arch.lane_idx() % QUAD
    page, entry, valid = find(c.paged, t, request, row, longest)
    scale = Float32(1)
    if const_expr(c.k_scale):
        if valid:
            scale = Float32(t.mKScale[page, entry, 0])
    factors = []
    if const_expr(c.stored == "mxfp4"):
        factors = [_block_factor(t, page, entry, valid, i) for i in range(QUAD)]
    parts = [cute.make_rmem_tensor(_BYTES, Uint8) for _ in range(c.row_bytes // (QUAD * _BYTES))]
    for i in cutlass.range_constexpr(len(parts)):
        parts[i].fill(0)
    if valid:
        for i in cutlass.range_constexpr(len(parts)):
            rPart = cute.recast_tensor(parts[i], t.mK.element_type)
            _load(c, t.mK[page, entry, None].iterator + (i * QUAD + lane) * cute.size(rPart), rPart)
    return Row(parts, scale, factors)


def from_shared(row: cute.Tensor, scales: Int32) -> Row:
    """A lane's part of an MXFP4 row in shared memory, with its four scales."""
    part = cute.make_rmem_tensor(_BYTES, Uint8)
    lane = cute.arch.lane_idx() % QUAD
    source = cute.make_ptr(Uint8, row.iterator.toint() + lane * _BYTES, cute.AddressSpace.smem, assumed_align=_BYTES)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(_BYTES)), part)
    return Row([part], Float32(1), [_factor(scales >> (8 * i) & 0xFF) for i in range(QUAD)])


def operand(c: Any, mma: cute.TiledMma, rows: list[Row]) -> Keys:
    """64 keys as the A operand, signs of scales folded in."""
    thr_mma = mma.get_slice(cute.arch.thread_idx()[0] % 128)
    rA = thr_mma.make_fragment_A(thr_mma.partition_shape_A((64, c.dim)))
    words = cute.recast_tensor(rA, Int32)
    for r, row in enumerate(rows):
        for i, part in enumerate(row.parts):
            loaded = cute.recast_tensor(part, Int32)
            loaded = [loaded[j] for j in range(4)]
            if c.stored == "f8e4m3":
                flip = cutlass.select_(row.scale < 0, Int32(_SIGNS), Int32(0))
                loaded = [word ^ flip for word in loaded]
            steps = _operands(c, loaded, row.factors)
            for step, halves in enumerate(steps):
                for half, word in enumerate(halves):
                    words[(0, r, half), 0, len(steps) * i + step] = word
    return Keys(rA, [cutlass.select_(row.scale < 0, -row.scale, row.scale) for row in rows])


@cute.jit
def prefetch(c: cutlass.Constexpr, t: Tensors, request: Int32, row: Int32, longest: Int32):
    """Prefetch a key that another CTA will load to L2."""
    page, entry, valid = find(c.paged, t, request, row, longest)
    if valid:
        at = t.mK[page, entry, None].iterator.toint()
        for i in cutlass.range_constexpr(0, c.row_bytes, l2.LINE):
            l2.prefetch(at + i)


@cute.jit
def _load(c: cutlass.Constexpr, at: Any, rPart: cute.Tensor):
    """16 bytes, by loads as wide as rows are aligned."""
    count = const_expr(c.load // (rPart.element_type.width // 8))
    for i in cutlass.range_constexpr(cute.size(rPart) // count):
        copies.load(at + i * count, cute.local_tile(rPart, (count,), (i,)))


@cute.jit
def _block_factor(t: Tensors, page: Int32, entry: Int32, valid: cutlass.Boolean, block: cutlass.Constexpr):
    """Scale of a block of a row."""
    byte = Int32(127)
    if valid:
        byte = Int32(t.mKScale[page, entry, block])
    return _factor(byte)


def _factor(byte: Int32) -> Int32:
    """2^(byte - 127), twice as bf16; 255 is NaN, and that of 0 is subnormal."""
    bits = cutlass.select_(byte == 0, Int32(0x40), byte << 7)
    return cutlass.select_(byte == 255, Int32(0x7FC0), bits) * 0x10001


def _operands(c: Any, loaded: list[Int32], factors: list[Int32]) -> list[tuple[Int32, Int32]]:
    """16 bytes a lane to its two words of each K step, in order."""
    lane = cute.arch.lane_idx() % QUAD
    if c.stored == c.dtype:
        words = transpose_quads(loaded, lane)  # q and q + 4 of one step, then of the next
        return [(words[0], words[1]), (words[2], words[3])]
    # Bytes are pairs: each lane has two steps of eight, of which lane q wants q and q + 4 of both.
    mixed = []
    for j in range(4):
        low = permute_bytes(loaded[0], loaded[1], 0x40 + 0x11 * j)  # bytes j and j + 4
        high = permute_bytes(loaded[2], loaded[3], 0x40 + 0x11 * j)
        mixed.append(permute_bytes(low, high, 0x5410))
    steps = []
    for word, factor in zip(transpose_quads(mixed, lane), factors, strict=True):
        pairs = [_of_e2m1(word >> (8 * i), factor) for i in range(4)]
        steps += [(pairs[0], pairs[1]), (pairs[2], pairs[3])]
    return steps


@dsl_user_op
def _of_e2m1(pair: Int32, factor: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two E2M1 codes, in bits 0..3 and 4..7, times their scale as bf16: exact, unless it is beyond bf16.

    Moved to where a bf16 has its exponent's last bits, a code is its number times 2^-126.
    """
    both = (pair & 0xF) | ((pair & 0xF0) << 12)
    bits = ((both & 0x00070007) << 6) | ((both & 0x00080008) << 12)
    text = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3; }"
    return asm(Int32, [Int32(x) for x in (bits, _TWO_TO_126, factor)], text, loc=loc, ip=ip)
