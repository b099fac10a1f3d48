"""Where results go that are numbers: outputs, their logarithmic sums, and sums."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda import word_ops

from ..sm90.arguments import Numbers, Tensors
from ..sm90.output import Output
from .columns import columns_of, factors_of, halves_of, pair_of
from .config import LANES, Config
from .memory import Memory
from .place import Place


class NumberOutput:
    """``run``: columns of a head that a thread has when results are merged."""

    run = 4

    def __init__(self, config: Config):
        self.c, self.stats = config, Output(config.dtype)

    @cute.jit
    def store(self, tensors: Tensors, place: Place, m: Memory, h0: Int32):
        """Of tensor memory, times factors in shared memory: a warpgroup's heads from ``h0`` on, in pairs of columns."""
        c, own = self.c, self.c.mma.own
        lane = cute.arch.lane_idx()
        odd = lane & 1
        # The heads that this thread stores are every second, of those that there are.
        head, there = place.head + h0 + odd, place.heads - h0 - odd
        column = cute.arch.warp_idx() % 4 * LANES + lane - odd
        out = self._address(tensors, place.token, head, column)
        by_two = Int64(tensors.results.out.stride[1]) * (2 * c.itemsize)
        halves, factors = halves_of(lane), factors_of(c, m, h0)
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO, target = columns_of(c, p, h0), out + p * (c.mma.part * c.itemsize)
            for h in cutlass.range_constexpr(0, own, 2):
                word_ops.store_word_if(target, pair_of(c, rO, factors, h, halves), there, h)
                target += by_two

    def vectors(self, run: Int32) -> list[Int32]:
        """Which fours of a head's columns a thread adds up to store run number ``run``."""
        return [run]

    @cute.jit
    def store_run(self, tensors: Tensors, token: Int32, head: Int32, there: Boolean, run: Int32, words: list[Int32]):
        op.store_2_pairs(self._address(tensors, token, head, run * self.run), words[0], words[1])

    def store_stats(
        self, tensors: Tensors, numbers: Numbers, token: Int32, head: Int32, row_max: Float32, row_sum: Float32
    ) -> None:
        self.stats.store_stats(tensors, numbers, token, head, row_max, row_sum)

    def _address(self, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        out = tensors.results.out
        offset = Int64(out.stride[0]) * token + Int64(out.stride[1]) * head + column
        return out.iterator.toint() + offset * self.c.itemsize
