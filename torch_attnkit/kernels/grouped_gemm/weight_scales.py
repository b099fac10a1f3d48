"""Block scales of weights, from the linear or the 128x4 layout of device memory to registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.fp4 import permute_bytes

from .arguments import Flags, Matrices
from .problem import ALIGNMENT, BULK_ROWS, PADDED, STRADDLING
from .work_tiles import WorkTile


def load_words(address: Any, count: int, kind: Any = Uint32) -> cute.Tensor:
    """Words of shared memory, aligned to their size."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=count * kind.width // 8)
    words = cute.make_rmem_tensor(count, kind)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), words)
    return words


def _scalar(address: Int64, nbytes: int) -> Uint32:
    """1, 2 or 4 bytes of device memory."""
    kind = {1: Uint8, 2: Uint16, 4: Uint32}[nbytes]
    return Uint32(copies.scalar(cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=nbytes)))


class WeightScales:
    """A lane's rows of a stage. Of ``config`` it takes ``rows`` of a warp, ``scales`` of a row in a stage, ``block``
    and ``scale_vector``."""

    def __init__(self, config: Any):
        self.c = config

    @cute.jit
    def read(self, flags: Flags, weights: Matrices, tile: WorkTile, starts: list[Any], k: Int32):
        """The scales of stage k, four a word: every 32nd row's."""
        c = self.c
        fragments = copies.fragments(c.rows // 32, c.scales // 4, Uint32)
        first = k * c.scales
        left = Int32(weights.packed.shape[2]) * 2 // c.block - first
        if const_expr(c.scale_vector == BULK_ROWS):
            for i in cutlass.range_constexpr(len(starts)):
                self._read_bulk(starts[i] + first, left, fragments[i])
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
                offset = line + 512 * j
                if flags.swizzled == PADDED:
                    offset = offset // scale.shape[2] * scale.stride[1] + offset % scale.shape[2]
                word = Uint32(0)
                for i in cutlass.range_constexpr(4 // v):
                    word = word | (_scalar(base + offset + v * i, v) << (8 * v * i))
                rS[j] = cutlass.select_(left >= 4 * j + 4, word, word & ((Uint32(1) << Uint32(8 * (left & 3))) - 1))

    @cute.jit
    def _load_line(self, address: Int64, left: Int32, rS: cute.Tensor):
        """Consecutive bytes, of which whole loads count."""
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
    def _read_bulk(self, address: Int32, left: Int32, rS: cute.Tensor):
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
