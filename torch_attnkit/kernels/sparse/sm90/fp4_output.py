"""Where results in FP4 go: numbers of a head, rounded as if they were stored, to codes and scales. Imports cutlass.

    words -> (RoPE channels: rotated back, rounded) -> amax over the lanes of a block -> scale byte, codes

Four lanes have 32 columns of a head, eight each: a word of codes, and half or a quarter of a block.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies, fp4, rope
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_blocks import Quantizer
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.formats.scale_layout import TILE_K, TILE_M
from torch_attnkit.kernels.fp4.problem import BLOCK

from .arguments import Tensors
from .config import Config
from .schedule import WorkTile

_NUMBERS = 8  # of a lane: a word of codes
_SPAN = 4 * _NUMBERS  # columns of four lanes
_TILE_BYTES = TILE_M * TILE_K  # of scales in the 128x4 layout
_ROWS = 32  # of a tile's, which follow one another 16 bytes apart


class Fp4Output:
    """``spans``: how many times 32 columns are stored together, 16 bytes of codes a lane if they are four."""

    def __init__(self, config: Config):
        self.dtype, self.dim = config.dtype, config.dim
        self.format, self.pairs, _, self.swizzled, self.divided = config.fp4
        self.block = BLOCK[self.format]
        self.kb = config.dim // self.block  # blocks of a head
        self.quantize = Quantizer(self.format, lanes=self.block // _NUMBERS)
        self.spans = min(4, config.ring.part // _SPAN)

    def store_stats(self, *_: Any) -> None:
        """Codes have no sums beside them."""

    @cute.jit
    def store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, column: cutlass.Constexpr,
        words: list[list[Int32]],
    ):  # fmt: skip
        """Of a head, where it is ``there``, ``spans`` times 32 columns from ``column`` on: of each 32 this lane's
        eight. All lanes of a warp call."""
        quad = cute.arch.lane_idx() & 3
        codes, scales = [], []
        for i in cutlass.range_constexpr(self.spans):
            code, byte = self._encode(tensors, tile, quad, const_expr(column + i * _SPAN), words[i])
            codes.append(code)
            scales.append(byte)
        head = tile.head + cutlass.min(row, tile.heads - 1)
        to = self._codes_at(tensors, tile, head, column)
        if const_expr(self.spans == 4):
            codes = softmax.transpose_quads(codes, quad)
            if there:
                copies.store_words(to + quad * 16, codes)
        else:
            for i in cutlass.range_constexpr(self.spans):
                if there:
                    _store_word(to + i * 16 + quad * 4, codes[i])
        self._store_scales(tensors, tile, head, there, quad, const_expr(column // self.block), scales)

    @cute.jit
    def store_chunk(
        self, tensors: Tensors, tile: WorkTile, row: Int32, there: Boolean, chunk: Int32, words: list[Int32]
    ):
        """The same of eight columns, chunk number ``chunk``, the next lane those of the next."""
        lane = cute.arch.lane_idx()
        code, byte = self._encode_at(tensors, tile, chunk * _NUMBERS, words)
        head = tile.head + cutlass.min(row, tile.heads - 1)
        if there:
            _store_word(self._codes_at(tensors, tile, head, chunk * _NUMBERS), code)
        block = chunk // (self.block // _NUMBERS)
        if there & (lane % (self.block // _NUMBERS) == 0):
            self._store_bytes(tensors, tile, head, block, byte, 1)

    @cute.jit
    def _encode(
        self, tensors: Tensors, tile: WorkTile, quad: Int32, column: cutlass.Constexpr, words: list[Int32]
    ):  # fmt: skip
        """The codes of this lane's eight numbers of 32 columns, and the scale byte of their block."""
        if const_expr(column + _SPAN > self.dim - 2 * self.pairs):
            words = self._turn_back(tensors, tile, column + quad * _NUMBERS, words)
        return self._quantize(tensors, words)

    @cute.jit
    def _encode_at(self, tensors: Tensors, tile: WorkTile, column: Int32, words: list[Int32]):
        """The same of columns that are not known beforehand."""
        held = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            held[i] = words[i]
        if const_expr(self.pairs > 0):
            if column + _NUMBERS > self.dim - 2 * self.pairs:
                turned = self._turn_back(tensors, tile, column, words)
                for i in cutlass.range_constexpr(len(words)):
                    held[i] = turned[i]
        return self._quantize(tensors, [held[i] for i in range(len(words))])

    @cute.jit
    def _turn_back(self, tensors: Tensors, tile: WorkTile, column: Int32, words: list[Int32]):
        """The pairs from ``column`` on, those that are rotated."""
        results, turned = tensors.results, []
        first = column // 2 - const_expr(self.dim // 2 - self.pairs)
        for i in cutlass.range_constexpr(len(words)):
            pair = cutlass.max(first + i, 0)
            cos, sin = (t[tile.token, pair].to(Float32) for t in (results.cos, results.sin))
            new = op.pack(self.dtype, *rope.turned_back(*fp4.floats(self.dtype, words[i]), cos, sin))
            turned.append(cutlass.select_(first + i >= 0, new, words[i]))
        return turned

    @cute.jit
    def _quantize(self, tensors: Tensors, words: list[Int32]):
        global_scale = None
        if const_expr(self.divided):
            global_scale = tensors.results.global_scale[0]
        x = [number for word in words for number in fp4.floats(self.dtype, word)]
        codes, byte = self.quantize(x, words, self.dtype, global_scale)
        return codes[0], byte

    def _codes_at(self, tensors: Tensors, tile: WorkTile, head: Int32, column: Any) -> Int64:
        codes = tensors.results.codes
        row = Int64(tile.token) * Int32(codes.shape[1]) + head
        return codes.iterator.toint() + row * (self.dim // 2) + column // 2

    @cute.jit
    def _store_scales(
        self, tensors: Tensors, tile: WorkTile, head: Int32, there: Boolean, quad: Int32, block: cutlass.Constexpr,
        scales: list[Int32],
    ):  # fmt: skip
        """Of ``spans`` times 32 columns: each lane has the byte of its block of each of them."""
        if const_expr(self.block == _SPAN):  # all four lanes have the same
            word = Int32(0)
            for i in cutlass.range_constexpr(self.spans):
                word = word | (scales[i] << (8 * i))
            if there & (quad == 0):
                self._store_bytes(tensors, tile, head, block, word, self.spans)
        else:  # two and two
            shift, mine = (quad >> 1) * 8, []
            for i in cutlass.range_constexpr(0, self.spans, 2):
                half = (scales[i] | (scales[i + 1] << 16)) << shift
                mine.append(half | cute.arch.shuffle_sync_bfly(half, 2))
            word = mine[0]
            if const_expr(len(mine) > 1):
                word = cutlass.select_(quad == 0, mine[0], mine[1])
            if there & (quad < len(mine)):
                self._store_bytes(tensors, tile, head, block + quad * 4, word, 4)

    @cute.jit
    def _store_bytes(
        self, tensors: Tensors, tile: WorkTile, head: Int32, block: Any, word: Int32, count: cutlass.Constexpr
    ):  # fmt: skip
        """The ``count`` bytes of a word, 1, 2 or 4, at the scales of a head from ``block`` on, a multiple of these; and
        zeros for the padding of the 128x4 layout, of which each token has an equal share."""
        scale = tensors.results.scale
        first, tokens, heads = scale.iterator.toint(), Int32(tensors.q.shape[0]), Int32(tensors.q.shape[1])
        if const_expr(not self.swizzled):
            row = Int64(tile.token) * heads + head
            _store_bytes(first + row * self.kb + block, word, count)
        else:
            each = Uint32(heads) // Uint32(Int32(scale.shape[0]))
            group = Int32(Uint32(head) // each)
            column = (head - group * Int32(each)) * self.kb + block
            padded, columns = Int32(scale.shape[1]), Int32(scale.shape[2])
            first += Int64(group) * padded * columns
            _store_bytes(first + _in_tiles(tile.token, column, columns), word, count)
            for row in cutlass.range(tile.token + tokens, padded, tokens, unroll=1):
                _store_bytes(first + _in_tiles(row, column, columns), Int32(0), count)


def _in_tiles(row: Int32, column: Int32, columns: Int32) -> Int64:
    """Bytes before a scale in the 128x4 layout."""
    row, column = Uint32(row), Uint32(column)
    tile = Int64(Int32(row // TILE_M)) * (columns // TILE_K) + Int32(column // TILE_K)
    inside = Int32(row % _ROWS) * 16 + Int32(row % TILE_M // _ROWS) * 4 + Int32(column % TILE_K)
    return tile * _TILE_BYTES + inside


def _store_word(address: Int64, word: Int32) -> None:
    _store_bytes(address, word, 4)


def _store_bytes(address: Int64, word: Int32, count: int) -> None:
    """1, 2 or 4 bytes, aligned to as many."""
    kind = {1: cutlass.Uint8, 2: cutlass.Uint16, 4: Int32}[count]
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=count)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = kind(word)
