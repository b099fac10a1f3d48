"""Scales of weights to the factors that decoded codes are multiplied with, in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.fp4_weights import factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Fixed, rings

from ..problem import PADDED
from .arguments import Flags, Matrices
from .config import ALIGNMENT, SPAN, STRADDLING, TOGETHER, Config
from .mainloop import load_words
from .schedule import WorkTile
from .shared import clear


def _scalar(address: Int64, nbytes: int) -> Uint32:
    """1, 2 or 4 bytes of device memory."""
    kind = {1: Uint8, 2: Uint16, 4: Uint32}[nbytes]
    return Uint32(copies.scalar(cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=nbytes)))


@cute.jit
def prefetch_biases(config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, lane: Int32):
    """Those of a work tile, for which its epilogue would wait as long as memory takes."""
    if flags.bias != 0:
        rows, each, bias = Int32(weights.codes.shape[1]), const_expr(config.rows // 32), weights.bias
        row = tile.row * config.rows + lane * each
        if const_expr(config.paired):
            apart = tile.row * config.features + lane % 16 * each + lane // 16 * (rows // 2)
            row = cutlass.select_(flags.interleaved != 0, row, apart)
        place = Int64(tile.expert) * bias.stride[0] + cutlass.min(row, rows - 1)
        memory_ops.prefetch((bias.iterator + place).toint())


class Lines(Fixed):
    """Rows of scales of a work tile in shared memory: a ring of one buffer. The next work tile's come while the stages
    are multiplied whose factors are ready."""

    def __init__(self, config: Config, memory: Any, warp: Int32):
        self.ring = rings(memory, warp, (("lines", 1, 1, config.factor_warps),))["lines"]
        self.address = memory.allocate(config.line_bytes, 128).toint()
        clear(self.address, config.line_bytes)  # behind a row's end, and where a work tile has no row, is read, too


class Factors:
    """A warp's work for a stage: every lane has every 32nd row."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def load(self, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, lane: Int32):
        """The scales of stage k."""
        return self.read(flags, weights, tile, self.rows(flags, weights, tile, lane), k)

    @cute.jit
    def rows(self, flags: Flags, weights: Matrices, tile: WorkTile, lane: Int32) -> list[Int64]:
        """Where the scales of each of the lane's rows begin, in tiles of 128x4 from those of its expert on. Rows behind
        the last have the last one's: nobody looks at what they give."""
        c = self.c
        rows, scale = Int32(weights.codes.shape[1]), weights.scale
        first, step = tile.row * c.rows + lane, Int32(32)
        if const_expr(c.paired):
            feature, up = tile.row * c.features + lane // 16 * 8 + lane % 8, lane // 8 % 2
            turns = flags.interleaved != 0
            first = cutlass.select_(turns, feature * 2 + up, feature + up * (rows // 2))
            step = cutlass.select_(turns, Int32(32), Int32(16))
        starts = [Int64(cutlass.min(first + i * step, rows - 1)) for i in range(c.rows // 32)]
        if flags.swizzled != 0:
            for i in cutlass.range_constexpr(c.rows // 32):
                row = Int32(starts[i])
                starts[i] = Int64(row // 128) * (Int32(scale.shape[2]) * 128) + row % 32 * 16 + row % 128 // 32 * 4
        else:
            base = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0]
            for i in cutlass.range_constexpr(c.rows // 32):
                starts[i] = base + starts[i] * scale.stride[1]
        return starts

    @cute.jit
    def bring(
        self, flags: Flags, weights: Matrices, tile: WorkTile, turn: Int32, part: Int32, lane: Int32, lines: Lines
    ) -> list[Int32]:
        """The same in shared memory, to which the first of the warps brings the scales of a work tile: all its rows, or
        those of gate and those of up, which follow each other in device memory."""
        c = self.c
        blocks, rows = Int32(weights.scale.shape[2]), Int32(weights.codes.shape[1])
        each, step, up = Int32(c.rows), Int32(32), Int32(0)  # rows of a copy; rows from a lane's to its next, to up
        local = lane
        if const_expr(c.paired):
            local, turns = lane // 16 * 8 + lane % 8, flags.interleaved != 0
            each, step = cutlass.select_(turns, each, Int32(c.features)), cutlass.select_(turns, step, Int32(16))
            up = cutlass.select_(turns, Int32(0), rows // 2)
            local = cutlass.select_(turns, local * 2, local) + lane // 8 % 2 * cutlass.select_(turns, Int32(1), each)
        if part == 0:
            count = cutlass.min(each, cutlass.select_(up > 0, up, rows) - tile.row * each)
            nbytes = count * blocks
            full = lines.ring.acquire(turn, cutlass.select_(up > 0, 2 * nbytes, nbytes))
            cute.arch.sync_warp()  # announced before it begins
            source = weights.scale.iterator.toint() + Int64(tile.expert) * weights.scale.stride[0]
            source += Int64(tile.row * each + lane * up) * blocks
            if lane < cutlass.select_(up > 0, Int32(2), Int32(1)):
                memory_ops.bulk_load(lines.address + lane * each * blocks, source, nbytes, full.toint())
        lines.ring.wait(turn)
        return [lines.address + (local + i * step) * blocks for i in range(c.rows // 32)]

    @cute.jit
    def read(self, flags: Flags, weights: Matrices, tile: WorkTile, starts: list[Any], k: Int32):
        """The scales of stage k, four a word: every 32nd row's."""
        c = self.c
        fragments = copies.fragments(c.rows // 32, c.scales // 4, Uint32)
        first = k * c.scales
        left = Int32(weights.codes.shape[2]) * 2 // c.block - first
        if const_expr(c.scale_vector == TOGETHER):
            for i in cutlass.range_constexpr(len(starts)):
                self._take(starts[i] + first, left, fragments[i])
        elif flags.swizzled != 0:
            base = weights.scale.iterator.toint() + Int64(tile.expert) * weights.scale.stride[0]
            for i in cutlass.range_constexpr(len(starts)):
                self._load_tiles(flags, weights.scale, base, starts[i] + first // 4 * 512, left, fragments[i])
        else:
            for i in cutlass.range_constexpr(len(starts)):
                if const_expr(c.scale_vector == STRADDLING):
                    self._load_straddling(starts[i] + first, left, fragments[i])
                else:
                    self._load_line(starts[i] + first, left, fragments[i])
        return fragments

    @cute.jit
    def _load_tiles(self, flags: Flags, scale: cute.Tensor, base: Int64, line: Int64, left: Int32, rS: cute.Tensor):
        """Words of the 128x4 layout, 512 bytes apart; of their bytes the first ``left`` count."""
        v = const_expr(min(ALIGNMENT.get(self.c.scale_vector, self.c.scale_vector), 4))
        rS.fill(0)
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
        rS.fill(0)
        for j in cutlass.range_constexpr(self.c.scales // v):
            if (j == 0) | (left > j * v):
                if const_expr(v < 4):
                    rS[j * v // 4] = rS[j * v // 4] | (_scalar(address + j * v, v) << (j * v % 4 * 8))
                else:
                    pointer = cute.make_ptr(Uint32, address + j * v, cute.AddressSpace.gmem, assumed_align=v)
                    copies.load(pointer, cute.make_tensor(rS.iterator + j * (v // 4), cute.make_layout(v // 4)))

    @cute.jit
    def _load_straddling(self, address: Int64, left: Int32, rS: cute.Tensor):
        """The same from even addresses, by words of which every other row has the first half of one: of GPT-OSS' 90
        bytes, five loads a stage instead of eight."""
        before = Int32(address & 2)
        words = [Uint32(0)] * (cute.size(rS) + 1)
        for j in cutlass.range_constexpr(len(words)):
            if 4 * j < left + before:
                words[j] = _scalar(address - before + 4 * j, 4)
        self._shift(words, before, left, rS)

    @cute.jit
    def _take(self, address: Int32, left: Int32, rS: cute.Tensor):
        """The same from shared memory, where words beyond the last may be anything."""
        before = address & 2
        words = [load_words(address - before + 4 * j, 1)[0] for j in range(cute.size(rS) + 1)]
        self._shift(words, before, left, rS)

    @cute.jit
    def _shift(self, words: list[Uint32], before: Int32, left: Int32, rS: cute.Tensor):
        """Words that begin ``before`` bytes early; of their bytes the first ``left`` count, an even number."""
        selector = cutlass.select_(before != 0, Int32(0x5432), Int32(0x3210))
        for j in cutlass.range_constexpr(cute.size(rS)):
            rS[j] = Uint32(permute_bytes(Int32(words[j]), Int32(words[j + 1]), selector))
        if left < self.c.scales:
            for j in cutlass.range_constexpr(cute.size(rS)):
                half = cutlass.select_(left > 4 * j, rS[j] & 0xFFFF, Uint32(0))
                rS[j] = cutlass.select_(left >= 4 * j + 4, rS[j], half)

    @cute.jit
    def store(self, fragments: list[cute.Tensor], lane: Int32, address: Int32):
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
