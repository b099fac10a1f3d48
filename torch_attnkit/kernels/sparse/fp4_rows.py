"""Where a head's numbers go as FP4: rotated back, to codes and scales in device memory.

    words -> (RoPE channels: rotated back, rounded) -> amax over the lanes of a block -> scale byte, codes

Bits are those of ``inverse_rope_fp4``: rounding is that of ``cuda/rope.py`` and ``cuda/fp4.py``. Which numbers a
thread has is its caller's affair: 8, 16 or 32 neighbouring columns of a head, a block or a part of one, whose other
parts its neighbours have; and so is what makes codes of them. Hopper's kernel has an epilogue of its own
(``sm90/fp4_output.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import fp4, rope
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.formats.scale_layout import TILE_K, TILE_M
from torch_attnkit.kernels.fp4 import rows
from torch_attnkit.kernels.fp4.problem import BLOCK

from .sm90.arguments import Codes

_TILE_BYTES = TILE_M * TILE_K  # of scales in the 128x4 layout
_ROWS = 32  # of a tile's, which follow one another 16 bytes apart


class Fp4Rows:
    """``fp4``: the fields of a problem's ``Fp4``; numbers come as words, two of ``dtype`` each. ``quantizer``: of a
    format and of how many lanes have a block what gives codes and a scale byte, as ``cuda/sm100/fp4_blocks.py`` has."""

    def __init__(self, dtype: Any, dim: int, fp4: tuple[Any, ...], quantizer: Callable[[str, int], Any]):
        self.dtype, self.dim, self.quantizer = dtype, dim, quantizer
        self.format, self.pairs, _, self.swizzled, self.divided = fp4
        self.block = BLOCK[self.format]
        self.kb = dim // self.block  # blocks of a head
        self.still = dim - 2 * self.pairs  # columns before the rotated ones

    @cute.jit
    def turned_back(self, results: Codes, token: Int32, column: Int32, words: list[Int32]):
        """The pairs from ``column`` on, those that are rotated."""
        turned = []
        first = (column >> 1) - const_expr(self.still // 2)
        for i in cutlass.range_constexpr(len(words)):
            pair = cutlass.max(first + i, 0)
            cos, sin = (t[token, pair].to(Float32) for t in (results.cos, results.sin))
            new = op.pack(self.dtype, *rope.turned_back(*fp4.floats(self.dtype, words[i]), cos, sin))
            turned.append(cutlass.select_(first + i >= 0, new, words[i]))
        return turned

    def global_scale(self, results: Codes) -> Any:
        """What numbers are multiplied by before they are quantised, or None."""
        return results.global_scale[0] if self.divided else None

    @cute.jit
    def store(
        self, results: Codes, token: Int32, head: Int32, there: Boolean, column: Int32, words: list[Int32],
        global_scale: Any,
    ):  # fmt: skip
        """The codes of a lane's columns of a head from ``column`` on, where the head is ``there``, and the scale of
        their block, by its first lane. All lanes of a warp call."""
        lanes = const_expr(self.block // (2 * len(words)))
        x = [number for word in words for number in fp4.floats(self.dtype, word)]
        codes, byte = self.quantizer(self.format, lanes)(x, global_scale)
        if there:
            row = Int64(token) * Int32(results.codes.shape[1]) + head
            to = results.codes.iterator.toint() + row * (self.dim // 2) + (column >> 1)
            rows.store_words([codes[i] for i in range(len(words) // 4)], cute.make_ptr(cutlass.Uint8, to))
        if there & (cute.arch.lane_idx() % lanes == 0):
            self._store_scale(results, token, head, column >> const_expr(self.block.bit_length() - 1), byte)

    @cute.jit
    def _store_scale(self, results: Codes, token: Int32, head: Int32, block: Int32, byte: Int32):
        """The byte of a block of a head; and zeros for the padding of the 128x4 layout, of which each token has an
        equal share."""
        scale, (tokens, heads) = results.scale, (Int32(size) for size in results.codes.shape[:2])
        first = scale.iterator.toint()
        if const_expr(not self.swizzled):
            _store_byte(first + (Int64(token) * heads + head) * self.kb + block, byte)
        else:
            each = Uint32(heads) // Uint32(Int32(scale.shape[0]))
            group = Int32(Uint32(head) // each)
            column = (head - group * Int32(each)) * self.kb + block
            padded, columns = Int32(scale.shape[1]), Int32(scale.shape[2])
            first += Int64(group) * padded * columns
            _store_byte(first + _in_tiles(token, column, columns), byte)
            for row in cutlass.range(token + tokens, padded, tokens, unroll=1):
                _store_byte(first + _in_tiles(row, column, columns), Int32(0))


def _in_tiles(row: Int32, column: Int32, columns: Int32) -> Int64:
    """Bytes before a scale in the 128x4 layout."""
    row, column = Uint32(row), Uint32(column)
    tile = Int64(Int32(row // TILE_M)) * (columns // TILE_K) + Int32(column // TILE_K)
    inside = Int32(row % _ROWS) * 16 + Int32(row % TILE_M // _ROWS) * 4 + Int32(column % TILE_K)
    return tile * _TILE_BYTES + inside


def _store_byte(address: Int64, byte: Int32) -> None:
    rows.store_byte(byte, cute.make_ptr(cutlass.Uint8, address))
