"""FP4 epilogue: O' transposed through shared memory to blocks of a head, then codes and scales
(``..epilogue.Fp4Store``).

    tensor memory -> scaled, rounded -> shared memory, 32 columns of a warp's heads -> a block or a part of one per lane
    -> (rotated back, rounded) -> amax, scale, codes -> global memory

Each warp has 64 bytes a head of the buffer of P', which is no longer read, so warps do not wait for one another;
16-byte chunks are swizzled, conflict-free.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from torch_attnkit.cuda import fp4, word_ops
from torch_attnkit.cuda.sm100.fp4_blocks import Quantizer
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.kernels.fp4 import rows

from ..arguments import Fp4Tensors, Tensors
from ..epilogue import Fp4Store
from .config import LANES, Config
from .cta import CtaCoord, Memory
from .epilogue import columns_of, factors_of, halves_of, pair_of

_CHUNK_COLUMNS = 8  # of a chunk
_PITCH = LANES * 2  # bytes of a head's 32 columns
_CHUNKS = _PITCH // CHUNK


class Fp4Output(Fp4Store):
    """``run``: columns of a thread in ``store_run``. ``width``: those in ``store``: a block if there are heads enough,
    so that its scale is computed once."""

    run = _CHUNK_COLUMNS

    def __init__(self, config: Config):
        super().__init__(config.dtype, config.dim, config.fp4)
        self.c, self.width = config, min(self.block, max(_CHUNK_COLUMNS, config.mma.own))

    @cute.jit
    def store(self, tensors: Tensors, cta: CtaCoord, m: Memory, h0: Int32):
        """From tensor memory: a warpgroup's heads from ``h0`` on, 32 columns a warp."""
        c, own = self.c, self.c.mma.own
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        staged = m.p_at + warp * (own * _PITCH)
        # Word ``lane // 2`` of every second head; heads h and h + 1 have the same swizzle.
        target = staged + (lane & 1) * _PITCH + ((lane >> 1) & 3) * 4
        starts = [target + ((lane >> 3) ^ step) * CHUNK for step in range(_CHUNKS)]
        halves, factors, global_scale = halves_of(lane), factors_of(c, m, h0), self.global_scale(tensors.results)
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO, column = columns_of(c, p, h0), p * c.mma.part + warp % 4 * LANES
            for h in cutlass.range_constexpr(0, own, 2):
                _store_word(starts[h // 2 % _CHUNKS] + h * _PITCH, pair_of(c, rO, factors, h, halves))
            cute.arch.sync_warp()
            for first in cutlass.range(0, own * LANES // self.width, LANES, unroll=1):
                self._store_staged(tensors, cta, h0, column, staged, first + lane, global_scale)
            cute.arch.sync_warp()  # the next part overwrites the buffer

    @cute.jit
    def _store_staged(
        self, tensors: Tensors, cta: CtaCoord, h0: Int32, column: Int32, staged: Int32, index: Int32, global_scale: Any
    ):
        """Item ``index`` of a warp's heads, of each of which 32 columns from ``column`` on are staged."""
        each = const_expr(LANES // self.width)  # of a head
        row, at = index // each, index % each * (self.width // _CHUNK_COLUMNS)  # the first chunk
        words = []
        for i in cutlass.range_constexpr(self.width // _CHUNK_COLUMNS):
            words += word_ops.load_words(4, staged + row * _PITCH + ((at + i) ^ ((row >> 1) & (_CHUNKS - 1))) * CHUNK)
        head, valid = cta.head + h0 + row, h0 + row < cta.heads
        self._store(tensors, cta.token, head, valid, column + at * _CHUNK_COLUMNS, words, global_scale)

    def vectors(self, run: Int32) -> list[Int32]:
        """Groups of four columns that a thread reduces for run ``run``: even lanes the lower halves of two runs, odd
        ones the upper halves, so that neighbours read 32 bytes together; four of eight lanes swap their runs, against
        bank conflicts."""
        swap, base = (run >> 2) & 1, run // 2 * 2
        return [(base + which) * 2 + (run & 1) for which in (swap, 1 - swap)]

    @cute.jit
    def store_run(self, tensors: Tensors, token: Int32, head: Int32, valid: Boolean, run: Int32, words: list[Int32]):
        """Store run ``run`` after exchanging halves with the neighbouring lane. All lanes of a warp call."""
        odd, second = (
            (run & 1) != 0,
            (((run >> 2) ^ run) & 1) != 0,
        )  # second: this lane's own vector
        own = [cutlass.select_(second, words[2 + i], words[i]) for i in range(2)]
        got = [cute.arch.shuffle_sync_bfly(cutlass.select_(second, words[i], words[2 + i]), 1) for i in range(2)]
        low = [cutlass.select_(odd, peer, local) for local, peer in zip(own, got, strict=True)]
        high = [cutlass.select_(odd, local, peer) for local, peer in zip(own, got, strict=True)]
        self._store(tensors, token, head, valid, run * self.run, low + high, self.global_scale(tensors.results))

    @cute.jit
    def _store(
        self, tensors: Tensors, token: Int32, head: Int32, valid: Boolean, column: Int32, words: list[Int32],
        global_scale: Any,
    ):  # fmt: skip
        """Store a lane's columns from ``column`` on, if ``valid``; neighbouring lanes have the rest of the block. All
        lanes of a warp call."""
        kept = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            kept[i] = words[i]
        if const_expr(self.pairs > 0):
            if column + const_expr(2 * len(words)) > self.still:
                rotated = self.unrotate(tensors.results, token, column, words)
                for i in cutlass.range_constexpr(len(words)):
                    kept[i] = rotated[i]
        words = [kept[i] for i in range(len(words))]
        self._quantise(tensors.results, token, head, valid, column, words, global_scale)

    @cute.jit
    def _quantise(
        self, results: Fp4Tensors, token: Int32, head: Int32, valid: Boolean, column: Int32, words: list[Int32],
        global_scale: Any,
    ):  # fmt: skip
        """Codes, and from the first lane of a block its scale."""
        lanes = const_expr(self.block // (2 * len(words)))
        x = [value for word in words for value in fp4.floats(self.dtype, word)]
        codes, byte = Quantizer(self.format, lanes)(x, global_scale)
        if valid:
            row = Int64(token) * Int32(results.codes.shape[1]) + head
            to = results.codes.iterator.toint() + row * (self.dim // 2) + (column >> 1)
            rows.store_words([codes[i] for i in range(len(words) // 4)], cute.make_ptr(cutlass.Uint8, to))
        if valid & (cute.arch.lane_idx() % lanes == 0):
            self.store_scale(results, results.codes, token, head, column >> self.shift, byte)


def _store_word(address: Int32, word: Int32) -> None:
    """To shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = word
