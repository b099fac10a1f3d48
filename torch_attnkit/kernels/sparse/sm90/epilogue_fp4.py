"""FP4 epilogue: O, rounded as if stored, to codes and block scales (``..epilogue.Fp4Store``).

A lane has 8, 16 or 32 neighbouring columns: a quarter, half or all of a block. Codes of four lanes are contiguous.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from torch_attnkit.cuda import fp4
from torch_attnkit.cuda.fp4_blocks import Quantizer
from torch_attnkit.kernels.fp4 import rows

from ..arguments import Fp4Tensors, Tensors
from ..epilogue import Fp4Store
from ..token_keys import WorkTile
from .config import Config

_CHUNK_COLUMNS = 8  # of a chunk


class Fp4Output(Fp4Store):
    """``run``: neighbouring columns of a lane in ``store``: a block, so that its scale is computed once, or half of
    one."""

    def __init__(self, config: Config):
        super().__init__(config.dtype, config.dim, config.fp4)
        self.run = min(self.block, config.ring.part // 4)

    @cute.jit
    def store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, valid: Boolean, column: cutlass.Constexpr,
        words: list[Int32],
    ):  # fmt: skip
        """Four lanes' columns of a row from ``column`` on, this lane's ``run`` of them; if ``valid``. All lanes of a
        warp call."""
        own = column + (cute.arch.lane_idx() & 3) * self.run
        if const_expr(column + 4 * self.run > self.dim - 2 * self.pairs):
            words = self.unrotate(tensors.results, tile.token, own, words)
        self._store(tensors, tile, row, valid, own, words)

    @cute.jit
    def store_chunk(
        self, tensors: Tensors, tile: WorkTile, row: Int32, valid: Boolean, chunk: Int32, words: list[Int32]
    ):  # fmt: skip
        """The 8 columns of ``chunk``, lane i + 1 those of the next chunk; if ``valid``. All lanes of a warp call."""
        kept, column = cute.make_rmem_tensor(len(words), Int32), chunk * _CHUNK_COLUMNS
        for i in cutlass.range_constexpr(len(words)):
            kept[i] = words[i]
        if const_expr(self.pairs > 0):
            if column + _CHUNK_COLUMNS > self.dim - 2 * self.pairs:
                rotated = self.unrotate(tensors.results, tile.token, column, words)
                for i in cutlass.range_constexpr(len(words)):
                    kept[i] = rotated[i]
        self._store(tensors, tile, row, valid, column, [kept[i] for i in range(len(words))])

    @cute.jit
    def _store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, valid: Boolean, column: Int32, words: list[Int32]
    ):  # fmt: skip
        """Quantise and store a lane's columns from ``column`` on; the first lane of a block stores its scale."""
        results, lanes = tensors.results, const_expr(self.block // (2 * len(words)))
        global_scale = self.global_scale(results)
        x = [value for word in words for value in fp4.floats(self.dtype, word)]
        codes, byte = Quantizer(self.format, lanes=lanes)(x, words, self.dtype, global_scale)
        head = tile.head + cutlass.min(row, tile.heads - 1)
        to = self._codes_address(results, tile.token, head, column)
        if valid:
            rows.store_words([codes[i] for i in range(len(words) // 4)], cute.make_ptr(cutlass.Uint8, to))
        if valid & (cute.arch.lane_idx() % lanes == 0):
            self.store_scale(results, tensors.q, tile.token, head, column >> self.shift, byte)

    def _codes_address(self, results: Fp4Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        row = Int64(token) * Int32(results.codes.shape[1]) + head
        return results.codes.iterator.toint() + row * (self.dim // 2) + (column >> 1)
