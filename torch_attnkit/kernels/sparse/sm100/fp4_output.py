"""Where results go in FP4: columns of O' to blocks of a head, and these to codes and scales.

    tensor memory -> times a head's factor, rounded -> shared memory, 32 columns of a warp's heads -> a block or a part
    of one to a lane -> (rotated back, rounded) -> amax, scale, codes -> device memory

A warp has the same 32 columns of all heads of its warpgroup, a column a lane. Where the probabilities were, of which
the last product is through, each warp has 64 bytes a head for itself, so that it waits for no other; their chunks of 16
bytes are swizzled, so that neither stores nor loads collide in banks.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from torch_attnkit.cuda import word_ops
from torch_attnkit.cuda.sm100.fp4_blocks import Quantizer
from torch_attnkit.cuda.smem import CHUNK

from ..fp4_rows import Fp4Rows
from ..sm90.arguments import Tensors
from .columns import columns_of, factors_of, halves_of, pair_of
from .config import LANES, Config
from .memory import Memory
from .place import Place

_NUMBERS = 8  # of a chunk
_PITCH = LANES * 2  # bytes of a head's 32 columns
_CHUNKS = _PITCH // CHUNK


class Fp4Output:
    """``run``: columns of a head that a thread has when results are merged. ``width``: those that it has of tensor
    memory: a block where there are heads enough, so that its scale is worked out once."""

    run = _NUMBERS

    def __init__(self, config: Config):
        self.c, self.rows = config, Fp4Rows(config.dtype, config.dim, config.fp4, Quantizer)
        self.width = min(self.rows.block, max(_NUMBERS, config.mma.own))

    def store_stats(self, *_: Any) -> None:
        """Codes have no sums beside them."""

    @cute.jit
    def store(self, tensors: Tensors, place: Place, m: Memory, h0: Int32):
        """Of tensor memory, times factors in shared memory: a warpgroup's heads from ``h0`` on, 32 columns a warp."""
        c, own = self.c, self.c.mma.own
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        staged = m.p_at + warp * (own * _PITCH)
        # Word ``lane // 2`` of every second head; heads h and h + 1 have their chunks in the same order.
        mine = staged + (lane & 1) * _PITCH + ((lane >> 1) & 3) * 4
        starts = [mine + ((lane >> 3) ^ turn) * CHUNK for turn in range(_CHUNKS)]
        halves, factors, global_scale = halves_of(lane), factors_of(c, m, h0), self.rows.global_scale(tensors.results)
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO, column = columns_of(c, p, h0), p * c.mma.part + warp % 4 * LANES
            for h in cutlass.range_constexpr(0, own, 2):
                _store_word(starts[h // 2 % _CHUNKS] + h * _PITCH, pair_of(c, rO, factors, h, halves))
            cute.arch.sync_warp()
            for first in cutlass.range(0, own * LANES // self.width, LANES, unroll=1):
                self._store_staged(tensors, place, h0, column, staged, first + lane, global_scale)
            cute.arch.sync_warp()  # the next part goes where this one was read

    @cute.jit
    def _store_staged(
        self, tensors: Tensors, place: Place, h0: Int32, column: Int32, staged: Int32, index: Int32, global_scale: Any
    ):
        """Number ``index`` of what lanes have of a warp's heads, each of which has 32 columns from ``column`` on."""
        each = const_expr(LANES // self.width)  # of a head
        row, at = index // each, index % each * (self.width // _NUMBERS)  # the first chunk
        words = []
        for i in cutlass.range_constexpr(self.width // _NUMBERS):
            words += word_ops.load_words(4, staged + row * _PITCH + ((at + i) ^ ((row >> 1) & (_CHUNKS - 1))) * CHUNK)
        head, there = place.head + h0 + row, h0 + row < place.heads
        self._store(tensors, place.token, head, there, column + at * _NUMBERS, words, global_scale)

    def vectors(self, run: Int32) -> list[Int32]:
        """Which fours of a head's columns a thread adds up to store run number ``run``: even lanes the lower halves of
        two runs, odd ones the upper halves of the same two, so that neighbours read 32 bytes together. Of eight lanes
        four have their runs the other way round, so that they read from all banks."""
        swap, base = (run >> 2) & 1, run // 2 * 2
        return [(base + which) * 2 + (run & 1) for which in (swap, 1 - swap)]

    @cute.jit
    def store_run(self, tensors: Tensors, token: Int32, head: Int32, there: Boolean, run: Int32, words: list[Int32]):
        """Run number ``run``, when neighbours have exchanged the halves of each other's; the next lane the next run.
        All lanes of a warp call."""
        odd, second = (run & 1) != 0, (((run >> 2) ^ run) & 1) != 0  # of this lane's vectors its own run's
        own = [cutlass.select_(second, words[2 + i], words[i]) for i in range(2)]
        got = [cute.arch.shuffle_sync_bfly(cutlass.select_(second, words[i], words[2 + i]), 1) for i in range(2)]
        low = [cutlass.select_(odd, other, mine) for mine, other in zip(own, got, strict=True)]
        high = [cutlass.select_(odd, mine, other) for mine, other in zip(own, got, strict=True)]
        self._store(tensors, token, head, there, run * self.run, low + high, self.rows.global_scale(tensors.results))

    @cute.jit
    def _store(
        self, tensors: Tensors, token: Int32, head: Int32, there: Boolean, column: Int32, words: list[Int32],
        global_scale: Any,
    ):  # fmt: skip
        """A lane's columns of a head from ``column`` on, where it is ``there``, the next lane those that follow in its
        block. All lanes of a warp call."""
        held = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            held[i] = words[i]
        if const_expr(self.rows.pairs > 0):
            if column + const_expr(2 * len(words)) > self.rows.still:
                turned = self.rows.turned_back(tensors.results, token, column, words)
                for i in cutlass.range_constexpr(len(words)):
                    held[i] = turned[i]
        words = [held[i] for i in range(len(words))]
        self.rows.store(tensors.results, token, head, there, column, words, global_scale)


def _store_word(address: Int32, word: Int32) -> None:
    """To shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = word
