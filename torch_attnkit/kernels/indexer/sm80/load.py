"""Keys from device memory to operands of ``mma.sync``, and queries to shared memory in the order that these want.

Products may take the columns of a row in any order, if keys and queries take the same. A quad of lanes loads 64 bytes
of a key, 16 a lane, and has them as its columns, encoded or not: nothing is exchanged between lanes, and no word passes
through shared memory. Of each 64 bytes of a query the four lanes then read 16 that belong to their own columns. Copies
put these side by side: ``source_of`` says which chunk of a row stands where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, e4m3
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed

from ..arguments import Tensors, find
from .plan import ATOM, ATOMS, CHUNK, GROUP

QUAD = 4  # lanes that share a row
_SIGNS = -0x7F7F7F80  # of four E4M3 codes
_TWO_TO_126 = 0x7E807E80  # two bf16
_MINUS_ZERO = -0x7FFF8000  # two bf16; what a product is added to that shall stay as it is


@dataclass
class Keys(Fixed):
    """A lane's part of a warp's keys, of rows ``row_of(0)`` to ``row_of(3)``."""

    words: list[list[Int32]]  # of each row, two a step of the product
    scales: list[Float32]  # absolute; signs are in the words

    def operand(self, atom: int, step: int) -> list[Int32]:
        """A of 16 keys and a step."""
        low, high = self.words[2 * atom : 2 * atom + 2]
        return [low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]]


def row_of(i: int) -> int:
    """The first lane's i-th row of a warp's: two of each product."""
    return i // 2 * ATOM + i % 2 * 8


@cute.jit
def load_keys(c: cutlass.Constexpr, t: Tensors, request: Int32, first: Int32, longest: Int32):
    """``first``: this lane's first row. Zeros from ``longest`` on. All loads are issued before the first use."""
    lane = cute.arch.lane_idx() % QUAD
    loaded = []
    for i in cutlass.range_constexpr(2 * ATOMS):
        page, entry, valid = find(c.paged, t, request, first + row_of(i), longest)
        loaded.append(_row(c, t, page, entry, valid, lane))
    words, scales = [], []
    for parts, scale, factor in loaded:
        flip = Int32(0)
        if const_expr(c.k_scale):
            flip = cutlass.select_(scale < 0, Int32(_SIGNS), Int32(0))
            scales.append(cutlass.select_(scale < 0, -scale, scale))
        row = []
        for part in parts:
            some = cute.recast_tensor(part, Int32)
            row += _operands(c, [some[j] ^ flip for j in range(4)], factor)
        words.append(row)
    return Keys(words, scales)


@cute.jit
def _row(c: cutlass.Constexpr, t: Tensors, page: Int32, entry: Int32, valid: cutlass.Boolean, lane: Int32):
    """A lane's 16 bytes of every 64, the row's scale, and that of the lane's block of MXFP4 as two bf16."""
    scale, byte = Float32(1), Int32(127)
    parts = [cute.make_rmem_tensor(CHUNK, Uint8) for _ in range(c.key_bytes // GROUP)]
    for part in parts:
        part.fill(0)
    if valid:
        if const_expr(c.k_scale):
            scale = Float32(t.mKScale[page, entry, 0])
        if const_expr(c.stored == "mxfp4"):
            byte = Int32(t.mKScale[page, entry, lane])
        for i in cutlass.range_constexpr(len(parts)):
            rPart = cute.recast_tensor(parts[i], t.mK.element_type)
            source = t.mK[page, entry, None].iterator + (i * QUAD + lane) * cute.size(rPart)
            count = const_expr(c.load // (rPart.element_type.width // 8))
            for n in cutlass.range_constexpr(cute.size(rPart) // count):
                copies.load(source + n * count, cute.local_tile(rPart, (count,), (n,)))
    return parts, scale, _factor(byte)


def _factor(byte: Int32) -> Int32:
    """2^(byte - 127), twice as bf16; 255 is NaN, and that of 0 is subnormal."""
    bits = cutlass.select_(byte == 0, Int32(0x40), byte << 7)
    return cutlass.select_(byte == 255, Int32(0x7FC0), bits) * 0x10001


def _operands(c: Any, loaded: list[Int32], factor: Int32) -> list[Int32]:
    """16 bytes of a key as operands, in order."""
    if c.stored == c.dtype:
        return loaded
    if c.stored == "mxfp4":
        return [_of_e2m1(word >> (8 * i), factor) for word in loaded for i in range(4)]
    return [e4m3.f16_pair(word >> (16 * i)) for word in loaded for i in range(2)]


@dsl_user_op
def _of_e2m1(pair: Int32, factor: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two E2M1 codes, in bits 0..3 and 4..7, times their scale as bf16: exact, unless it is beyond bf16.

    Moved to where a bf16 has its exponent's last bits, a code is its number times 2^-126. Products of pairs of bf16 are
    sums of them here, since targets before sm_90 have no others.
    """
    both = (pair & 0xF) | ((pair & 0xF0) << 12)
    bits = ((both & 0x00070007) << 6) | ((both & 0x00080008) << 12)
    text = "{ .reg .b32 t; fma.rn.bf16x2 t, $1, $2, $4; fma.rn.bf16x2 $0, t, $3, $4; }"
    return asm(Int32, [Int32(x) for x in (bits, _TWO_TO_126, factor, _MINUS_ZERO)], text, loc=loc, ip=ip)


def source_of(c: Any, position: Int32) -> Int32:
    """The chunk of a query that stands at ``position``: lane q of a quad reads every fourth position, from q on."""
    e = c.expansion
    if e == 1:
        return position
    lane, group = position % QUAD, position // QUAD
    return group // e * (QUAD * e) + lane * e + group % e


def swizzled(c: Any, head: Int32, position: Int32) -> Int32:
    """Where a chunk of a head's query is from the begin of a token's: neighbouring heads, of which eight lanes read
    chunks at once, lie in different banks."""
    if c.row_bytes > GROUP:
        position = position ^ (head % 2 * QUAD)
    return head * c.row_bytes + position * CHUNK


@cute.jit
def load_query(c: cutlass.Constexpr, mQ: cute.Tensor, token: Int32, stage: Int32):
    """All threads: start the copy of a token's queries; zeros for columns without a head. A thread has one chunk of
    every so many heads, an even number of them."""
    chunks = const_expr(c.row_bytes // CHUNK)
    step, size = const_expr(c.threads // chunks), const_expr(mQ.element_type.width // 8)
    thread = op.thread_index()
    head, position = thread // chunks, thread % chunks
    to, stride = stage + swizzled(c, head, position), Int64(mQ.stride[1]) * size
    row = mQ.iterator.toint() + Int64(token) * mQ.stride[0] * size
    at = row + stride * head + source_of(c, position) * CHUNK
    for n in cutlass.range_constexpr(-(-c.columns // step)):
        if (head < c.columns) or const_expr((n + 1) * step <= c.columns):
            known = (head < c.heads) | const_expr((n + 1) * step <= c.heads)
            op.copy_16_async(to, cutlass.select_(known, at, row), cutlass.select_(known, Int32(CHUNK), Int32(0)))
        head, to, at = head + step, to + step * c.row_bytes, at + stride * step


def query_addresses(c: Any) -> tuple[Int32, Int32]:
    """Where this lane reads of the even and of the odd groups of a token's first eight heads, from its begin."""
    lane = cute.arch.lane_idx()
    head, position = lane // QUAD, lane % QUAD
    at, side = head * c.row_bytes + position * CHUNK, head % 2 * GROUP
    return (at, at) if c.row_bytes == GROUP else (at + side, at - side)
