"""Tokens and scales to shared memory, as the products want them. Imports cutlass.

A lane brings 32 numbers of a token at a time, those that its counterpart among the consumers multiplies: the second
operand of ``mma.m16n8k16`` for eight steps, K being in the order in which a word's codes are decoded. What a token's
numbers are rounded to, and how they become bf16, happens on the way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Ring

from .arguments import Flags, Matrices, Tensors
from .config import GATHERERS, SPAN, Config
from .schedule import Work, WorkTile
from .shared import Shared

_EACH = 32  # numbers of a token that a lane brings
_CHUNK = 8  # of them under a word of codes
_UPPER = 0xFFFF0000  # half of a word


def operands(rV: cute.Tensor, parts: int) -> list[list[Any]]:
    """32 numbers as words of bf16, 4 for each chunk of 8: numbers i and i + 4. Two lists if they are sums of two bf16,
    of which infinities and NaN are the first alone."""
    if rV.element_type is cutlass.BFloat16:
        words = cute.recast_tensor(rV, Uint32)
        return [_pairs_of_words(words)]
    if parts == 1:
        return [_pairs(rV)]
    rX = cute.make_rmem_tensor(_EACH, Float32)
    rX.store(rV.load().to(Float32))
    rHigh = cute.make_rmem_tensor(_EACH, Float32)
    bits, high = cute.recast_tensor(rX, Uint32), cute.recast_tensor(rHigh, Uint32)
    for i in range(_EACH):
        high[i] = bits[i] & Uint32(_UPPER)
        rest = rX[i] - rHigh[i]
        rX[i] = cutlass.select_((high[i] & 0x7F800000) == 0x7F800000, Float32(0.0), rest)
    return [_pairs(rHigh), _pairs(rX)]


def _pairs(rX: cute.Tensor) -> list[Any]:
    x = rX if rX.element_type is Float32 else cute.make_rmem_tensor(_EACH, Float32)
    if x is not rX:
        x.store(rX.load().to(Float32))
    starts = range(0, _EACH, _CHUNK)
    return [op.pack(cutlass.BFloat16, x[s + i], x[s + i + 4]) for s in starts for i in range(4)]


def _pairs_of_words(words: cute.Tensor) -> list[Any]:
    out = []
    for s in range(0, _EACH // 2, 4):
        for i in range(2):
            low, high = words[s + i], words[s + i + 2]
            out += [(low & 0xFFFF) | (high << 16), (low >> 16) | (high & Uint32(_UPPER))]
    return out


class Gather:
    """The warps that bring tokens and scales; each has every ``GATHERERS``-th stage."""

    def __init__(self, config: Config, rounded: Any):
        self.c = config
        self.rounded = rounded  # 32 float32 numbers of a row, and a global scale, to what they are multiplied as

    @cute.jit
    def run(
        self, tensors: Tensors, flags: Flags, weights: Matrices, source: cute.Tensor, work: Work, ring: Ring,
        shared: Shared, warp: Int32,
    ):  # fmt: skip
        """``source``: (tokens, columns) of the up product, (places, columns) of the down product."""
        c = self.c
        lane = cute.arch.lane_idx()
        steps = (Int32(source.shape[1]) + c.stage - 1) // c.stage
        global_scale = Float32(1.0)
        if flags.activation != 0:
            global_scale = weights.activation[0]
        n = Int32(0)
        for turn in cutlass.range(work.count, unroll=1):
            tile = work.tile(tensors, turn)
            rows = [self._row(tensors, tile, lane // 4 + 8 * i) for i in range(c.columns // 8)]
            for k in cutlass.range((warp - n) & (GATHERERS - 1), steps, GATHERERS, unroll=1):
                full = ring.await_empty(n + k)
                stage = ring.slot(n + k)
                for i in cutlass.range_constexpr(c.columns // 8):
                    if 8 * i < tile.columns:
                        self._tokens(source, rows[i], k, i, lane, global_scale, shared.tokens(stage))
                self._scales(flags, weights, tile, k, lane, shared.factors(stage))
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            n += steps

    @cute.jit
    def _row(self, tensors: Tensors, tile: WorkTile, column: Int32):
        """The row of ``source`` of a work tile's token, -1 beyond the last."""
        row = Int32(-1)
        if column < tile.columns:
            row = tile.first + column
            if const_expr(self.c.paired):
                row = tensors.order[row] // Int32(tensors.indices.shape[1])
        return row

    @cute.jit
    def _tokens(
        self, source: cute.Tensor, row: Int32, k: Int32, group: cutlass.Constexpr, lane: Int32, global_scale: Float32,
        address: Int32,
    ):  # fmt: skip
        """The lane's numbers of one of 8 tokens, in every span of stage k."""
        c = self.c
        columns = Int32(source.shape[1])
        for span in cutlass.range_constexpr(c.stage // SPAN):
            at = k * c.stage + span * SPAN + lane % 4 * _EACH
            rV = cute.make_rmem_tensor(_EACH, source.element_type)
            rV.fill(0)
            if (row >= 0) & (at < columns):
                copies.load(source.iterator + (Int64(row) * source.stride[0] + at), rV)
            if const_expr(self.rounded is not None):
                rX = cute.make_rmem_tensor(_EACH, Float32)
                rX.store(rV.load().to(Float32))
                self.rounded(rX, global_scale)
                rV = rX
            for part, words in enumerate(operands(rV, c.parts)):
                for chunk in cutlass.range_constexpr(4):
                    line = (span * 4 + chunk) * (c.columns // 8) + group
                    place = address + part * c.part_bytes + line * 512 + lane * 16
                    copies.store_words(place, [Int32(w) for w in words[4 * chunk : 4 * chunk + 4]], cute.AddressSpace.smem)

    @cute.jit
    def _scales(
        self, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, lane: Int32, address: Int32
    ):
        """The factors of stage k: (span, row, quad), which a lane of the consumers reads 2 or 4 bytes of."""
        c = self.c
        rows, columns = Int32(weights.codes.shape[1]), Int32(weights.codes.shape[2]) * 2
        blocks = columns // c.block
        for i in cutlass.range_constexpr(c.rows // 32):
            local = lane + 32 * i
            row = tile.row * c.rows + local
            inside = row < rows
            if const_expr(c.paired):
                feature, up = tile.row * c.features + local // 16 * 8 + local % 8, local // 8 % 2
                inside = feature < rows // 2
                row = cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * (rows // 2))
            rS = cute.make_rmem_tensor(c.scales, cutlass.Uint8)
            rS.fill(0)
            if inside:
                self._row_scales(flags, weights, tile.expert, row, k * c.scales, blocks, rS)
            words = cute.recast_tensor(rS, Uint32)
            convert = factors_of_e4m3 if c.format == "nvfp4" else factors_of_e8m0
            for span in cutlass.range_constexpr(c.stage // SPAN):
                count = const_expr(SPAN // c.block // 4)  # words of scales, each of 4
                factors = []
                for j in cutlass.range_constexpr(count):
                    factors += convert(words[span * count + j])
                place = address + (span * c.rows + local) * (8 * count)
                target = cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=8)
                sF = cute.make_tensor(target, cute.make_layout(2 * count))
                rF = cute.make_rmem_tensor(2 * count, Uint32)
                for j in cutlass.range_constexpr(2 * count):
                    rF[j] = factors[j]
                cute.autovec_copy(rF, sF)

    @cute.jit
    def _row_scales(
        self, flags: Flags, weights: Matrices, expert: Int32, row: Int32, first: Int32, blocks: Int32, rS: cute.Tensor
    ):
        """Bytes [first, first + scales) of a row; beyond the last stay zeros."""
        c, scale = self.c, weights.scale
        base = scale.iterator + Int64(expert) * scale.stride[0]
        if flags.swizzled != 0:
            per_line = Int32(scale.shape[2]) // 4
            line = base + (Int64(row // 128) * per_line * 512 + row % 32 * 16 + row % 128 // 32 * 4)
            for j in cutlass.range_constexpr(c.scales // 4):
                left = blocks - first - 4 * j
                if left > 0:
                    rWord = cute.make_rmem_tensor(4, cutlass.Uint8)
                    for b in cutlass.range_constexpr(4):
                        rWord[b] = copies.scalar(line + ((first // 4 + j) * 512 + b))
                    for b in cutlass.range_constexpr(4):
                        if b < left:
                            rS[4 * j + b] = rWord[b]
        else:
            line = base + (Int64(row) * scale.stride[1] + first)
            v = const_expr(c.scale_vector)
            for j in cutlass.range_constexpr(c.scales // v):
                if first + j * v < blocks:
                    copies.load(line + j * v, cute.make_tensor(rS.iterator + j * v, cute.make_layout(v)))
