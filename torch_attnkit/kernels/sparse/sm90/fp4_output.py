"""Where results in FP4 go: numbers of a head, rounded as if they were stored, to codes and scales.

    words -> (RoPE channels: rotated back, rounded) -> amax over the lanes of a block -> scale byte, codes

A lane has 8, 16 or 32 neighbouring columns of a head: a quarter, half or all of a block. The codes of four lanes lie
side by side in memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import fp4, rope
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_blocks import Quantizer
from torch_attnkit.formats.scale_layout import TILE_K, TILE_M
from torch_attnkit.kernels.fp4 import rows
from torch_attnkit.kernels.fp4.problem import BLOCK

from .arguments import Tensors
from .config import Config
from .schedule import WorkTile

_NUMBERS = 8  # of a chunk
_TILE_BYTES = TILE_M * TILE_K  # of scales in the 128x4 layout
_ROWS = 32  # of a tile's, which follow one another 16 bytes apart


class Fp4Output:
    """``run``: how many neighbouring columns of a head a lane has when it stores four lanes' columns: a block, so that
    its scale is worked out once, or half of one."""

    def __init__(self, config: Config):
        self.dtype, self.dim = config.dtype, config.dim
        self.format, self.pairs, _, self.swizzled, self.divided = config.fp4
        self.block = BLOCK[self.format]
        self.kb = config.dim // self.block  # blocks of a head
        self.run = min(self.block, config.ring.part // 4)

    def store_stats(self, *_: Any) -> None:
        """Codes have no sums beside them."""

    @cute.jit
    def store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, column: cutlass.Constexpr,
        words: list[Int32],
    ):  # fmt: skip
        """Of a head, where it is ``there``, four lanes' columns from ``column`` on: this lane's ``run``. All lanes of a
        warp call."""
        mine = column + (cute.arch.lane_idx() & 3) * self.run
        if const_expr(column + 4 * self.run > self.dim - 2 * self.pairs):
            words = self._turn_back(tensors, tile, mine, words)
        self._store(tensors, tile, row, there, mine, words)

    @cute.jit
    def store_chunk(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, chunk: Int32, words: list[Int32]
    ):  # fmt: skip
        """The same of eight columns, chunk number ``chunk``, the next lane those of the next."""
        held, column = cute.make_rmem_tensor(len(words), Int32), chunk * _NUMBERS
        for i in cutlass.range_constexpr(len(words)):
            held[i] = words[i]
        if const_expr(self.pairs > 0):
            if column + _NUMBERS > self.dim - 2 * self.pairs:
                turned = self._turn_back(tensors, tile, column, words)
                for i in cutlass.range_constexpr(len(words)):
                    held[i] = turned[i]
        self._store(tensors, tile, row, there, column, [held[i] for i in range(len(words))])

    @cute.jit
    def _turn_back(self, tensors: Tensors, tile: WorkTile, column: Int32, words: list[Int32]):
        """The pairs from ``column`` on, those that are rotated."""
        results, turned = tensors.results, []
        first = (column >> 1) - const_expr(self.dim // 2 - self.pairs)
        for i in cutlass.range_constexpr(len(words)):
            pair = cutlass.max(first + i, 0)
            cos, sin = (t[tile.token, pair].to(Float32) for t in (results.cos, results.sin))
            new = op.pack(self.dtype, *rope.turned_back(*fp4.floats(self.dtype, words[i]), cos, sin))
            turned.append(cutlass.select_(first + i >= 0, new, words[i]))
        return turned

    @cute.jit
    def _store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, column: Int32, words: list[Int32]
    ):  # fmt: skip
        """The codes of a lane's columns from ``column`` on, and the scale of their block, by its first lane."""
        global_scale = None
        if const_expr(self.divided):
            global_scale = tensors.results.global_scale[0]
        lanes = const_expr(self.block // (2 * len(words)))
        x = [number for word in words for number in fp4.floats(self.dtype, word)]
        codes, byte = Quantizer(self.format, lanes=lanes)(x, words, self.dtype, global_scale)
        head = tile.head + cutlass.min(row, tile.heads - 1)
        to = self._codes_at(tensors, tile, head, column)
        if there:
            rows.store_words([codes[i] for i in range(len(words) // 4)], cute.make_ptr(cutlass.Uint8, to))
        if there & (cute.arch.lane_idx() % lanes == 0):
            self._store_scale(tensors, tile, head, column >> const_expr(self.block.bit_length() - 1), byte)

    def _codes_at(self, tensors: Tensors, tile: WorkTile, head: Int32, column: Any) -> Int64:
        codes = tensors.results.codes
        row = Int64(tile.token) * Int32(codes.shape[1]) + head
        return codes.iterator.toint() + row * (self.dim // 2) + (column >> 1)

    @cute.jit
    def _store_scale(self, tensors: Tensors, tile: WorkTile, head: Int32, block: Int32, byte: Int32):
        """The byte of a block of a head; and zeros for the padding of the 128x4 layout, of which each token has an
        equal share."""
        scale = tensors.results.scale
        first, tokens, heads = scale.iterator.toint(), Int32(tensors.q.shape[0]), Int32(tensors.q.shape[1])
        if const_expr(not self.swizzled):
            row = Int64(tile.token) * heads + head
            _store_byte(first + row * self.kb + block, byte)
        else:
            each = Uint32(heads) // Uint32(Int32(scale.shape[0]))
            group = Int32(Uint32(head) // each)
            column = (head - group * Int32(each)) * self.kb + block
            padded, columns = Int32(scale.shape[1]), Int32(scale.shape[2])
            first += Int64(group) * padded * columns
            _store_byte(first + _in_tiles(tile.token, column, columns), byte)
            for row in cutlass.range(tile.token + tokens, padded, tokens, unroll=1):
                _store_byte(first + _in_tiles(row, column, columns), Int32(0))


def _in_tiles(row: Int32, column: Int32, columns: Int32) -> Int64:
    """Bytes before a scale in the 128x4 layout."""
    row, column = Uint32(row), Uint32(column)
    tile = Int64(Int32(row // TILE_M)) * (columns // TILE_K) + Int32(column // TILE_K)
    inside = Int32(row % _ROWS) * 16 + Int32(row % TILE_M // _ROWS) * 4 + Int32(column % TILE_K)
    return tile * _TILE_BYTES + inside


def _store_byte(address: Int64, byte: Int32) -> None:
    rows.store_byte(byte, cute.make_ptr(cutlass.Uint8, address))
