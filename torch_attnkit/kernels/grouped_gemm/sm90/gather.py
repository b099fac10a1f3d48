"""Tokens and scales to shared memory, as the products want them. Imports cutlass.

A lane brings 32 numbers of a token at a time, those that its counterpart among the consumers multiplies: the second
operand of ``mma.m16n8k16`` for eight steps, K being in the order in which a word's codes are decoded. What a token's
numbers are rounded to, and how they become bf16, happens on the way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Ring

from ..problem import PADDED
from .arguments import Flags, Matrices, Tensors
from .config import GATHERERS, SPAN, Config
from .schedule import Work, WorkTile, width_of
from .shared import Shared

_EACH = 32  # numbers of a token that a lane brings
_AT_ONCE = 4  # loads of so many numbers on their way
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


def _scalar(address: Int64, nbytes: int) -> Uint32:
    """1, 2 or 4 bytes of device memory."""
    kind = {1: Uint8, 2: Uint16, 4: Uint32}[nbytes]
    return Uint32(copies.scalar(cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=nbytes)))


class Gather:
    """The warps that bring tokens and scales; each has every ``GATHERERS``-th stage.

    All loads of a stage are on their way before one is used, and before its place in the ring is free.
    """

    def __init__(self, config: Config, rounded: Any):
        self.c = config
        self.rounded = rounded  # 32 float32 numbers of a row, and a global scale, to what they are multiplied as
        spans = config.stage // SPAN
        units = [(group, span) for group in range(config.columns // 8) for span in range(spans)]
        self.batches = [units[i : i + _AT_ONCE] for i in range(0, len(units), _AT_ONCE)]

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
            room = width_of(c, tile.columns)
            for k in cutlass.range((warp - n) & (GATHERERS - 1), steps, GATHERERS, unroll=1):
                rS = self._load_scales(flags, weights, tile, k, lane)
                rV = self._load_tokens(source, rows, self.batches[0], k, lane)
                full = ring.await_empty(n + k)
                stage = ring.slot(n + k)
                self._store_tokens(rV, self.batches[0], lane, global_scale, shared.tokens(stage))
                self._store_factors(rS, lane, shared.factors(stage))
                for batch in cutlass.range_constexpr(1, len(self.batches)):
                    units = const_expr(self.batches[batch])
                    if 8 * units[0][0] < room:
                        rMore = self._load_tokens(source, rows, units, k, lane)
                        self._store_tokens(rMore, units, lane, global_scale, shared.tokens(stage))
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
    def _load_tokens(self, source: cute.Tensor, rows: list[Int32], units: cutlass.Constexpr, k: Int32, lane: Int32):
        """The lane's numbers of stage k, by unit: one of a group of 8 tokens, a span."""
        columns = Int32(source.shape[1])
        fragments = copies.fragments(len(units), _EACH, source.element_type)
        for i, (group, span) in enumerate(units):
            at = k * self.c.stage + span * SPAN + lane % 4 * _EACH
            fragments[i].fill(0)
            if (rows[group] >= 0) & (at < columns):
                copies.load(source.iterator + (Int64(rows[group]) * source.stride[0] + at), fragments[i])
        return fragments

    @cute.jit
    def _store_tokens(
        self, fragments: list[cute.Tensor], units: cutlass.Constexpr, lane: Int32, global_scale: Float32,
        address: Int32,
    ):  # fmt: skip
        c = self.c
        for i, (group, span) in enumerate(units):
            rV = fragments[i]
            if const_expr(self.rounded is not None):
                rX = cute.make_rmem_tensor(_EACH, Float32)
                rX.store(rV.load().to(Float32))
                self.rounded(rX, global_scale)
                rV = rX
            for part, words in enumerate(operands(rV, c.parts)):
                for chunk in cutlass.range_constexpr(4):
                    line = (span * 4 + chunk) * (c.columns // 8) + group
                    place = address + part * c.part_bytes + line * 512 + lane * 16
                    four = [Int32(w) for w in words[4 * chunk : 4 * chunk + 4]]
                    copies.store_words(place, four, cute.AddressSpace.smem)

    @cute.jit
    def _load_scales(self, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, lane: Int32):
        """The scales of stage k, four a word: every 32nd row's."""
        c = self.c
        rows, columns = Int32(weights.codes.shape[1]), Int32(weights.codes.shape[2]) * 2
        fragments = copies.fragments(c.rows // 32, c.scales // 4, Uint32)
        for i in cutlass.range_constexpr(c.rows // 32):
            local = lane + 32 * i
            row = tile.row * c.rows + local
            inside = row < rows
            if const_expr(c.paired):
                feature, up = tile.row * c.features + local // 16 * 8 + local % 8, local // 8 % 2
                inside = feature < rows // 2
                row = cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * (rows // 2))
            fragments[i].fill(0)
            if inside:
                base = weights.scale.iterator.toint() + Int64(tile.expert) * weights.scale.stride[0]
                first, blocks = k * c.scales, columns // c.block
                if flags.swizzled != 0:
                    words = Int32(weights.scale.shape[2]) // 4  # of a row
                    line = (Int64(row // 128) * words + first // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4
                    self._load_tiles(flags, weights.scale, base, line, blocks - first, fragments[i])
                else:
                    self._load_line(base + Int64(row) * weights.scale.stride[1] + first, blocks - first, fragments[i])
        return fragments

    @cute.jit
    def _load_tiles(self, flags: Flags, scale: cute.Tensor, base: Int64, line: Int64, left: Int32, rS: cute.Tensor):
        """Words of the 128x4 layout, 512 bytes apart; of their bytes the first ``left`` count."""
        v = const_expr(min(self.c.scale_vector, 4))
        for j in cutlass.range_constexpr(cute.size(rS)):
            if left > 4 * j:
                place = line + 512 * j
                if flags.swizzled == PADDED:
                    place = place // scale.shape[2] * scale.stride[1] + place % scale.shape[2]
                word = Uint32(0)
                for i in cutlass.range_constexpr(4 // v):
                    word = word | (_scalar(base + place + v * i, v) << (8 * v * i))
                rS[j] = cutlass.select_(left >= 4 * j + 4, word, word & ((Uint32(1) << Uint32(8 * (left & 3))) - 1))

    @cute.jit
    def _load_line(self, address: Int64, left: Int32, rS: cute.Tensor):
        """Bytes that follow each other, of which whole loads count."""
        v = const_expr(self.c.scale_vector)
        for j in cutlass.range_constexpr(self.c.scales // v):
            if left > j * v:
                if const_expr(v < 4):
                    rS[j * v // 4] = rS[j * v // 4] | (_scalar(address + j * v, v) << (j * v % 4 * 8))
                else:
                    pointer = cute.make_ptr(Uint32, address + j * v, cute.AddressSpace.gmem, assumed_align=v)
                    copies.load(pointer, cute.make_tensor(rS.iterator + j * (v // 4), cute.make_layout(v // 4)))

    @cute.jit
    def _store_factors(self, fragments: list[cute.Tensor], lane: Int32, address: Int32):
        """(span, row, quad), of which a lane of the consumers reads 2 or 4 bytes."""
        c = self.c
        convert = factors_of_e4m3 if c.format == "nvfp4" else factors_of_e8m0
        count = const_expr(SPAN // c.block // 4)  # words of scales in a span, each of 4
        for i, rS in enumerate(fragments):
            for span in cutlass.range_constexpr(c.stage // SPAN):
                place = address + (span * c.rows + lane + 32 * i) * (8 * count)
                sF = cute.make_tensor(
                    cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=8), cute.make_layout(2 * count)
                )
                rF = cute.make_rmem_tensor(2 * count, Uint32)
                for j in cutlass.range_constexpr(count):
                    rF[2 * j], rF[2 * j + 1] = convert(rS[span * count + j])
                cute.autovec_copy(rF, sF)
