"""Epilogue of a consumer warpgroup: combine both warpgroups' row statistics, apply sinks, normalise, store."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars, Tensors
from ..epilogue import DenseStore, factor_beside, sink_of
from ..token_keys import WorkTile
from .barriers import by_head, sync_consumers
from .config import Config
from .epilogue_fp4 import Fp4Output
from .mainloop import Fragments


class DenseOutput(DenseStore):
    """Stores 16-bit results; ``run``: neighbouring columns of a lane."""

    run = 8

    @cute.jit
    def store(
        self, tensors: Tensors, tile: WorkTile, row: Int32, valid: Boolean, column: cutlass.Constexpr,
        words: list[Int32],
    ):  # fmt: skip
        """Four lanes' columns of a row from ``column`` on, this lane's ``run`` of them; if ``valid``."""
        head = tile.head + cutlass.min(row, tile.heads - 1)
        to = self.address(tensors, tile.token, head, column + (cute.arch.lane_idx() & 3) * 8)
        if valid:
            copies.store_words(to, words)

    @cute.jit
    def store_chunk(
        self, tensors: Tensors, tile: WorkTile, row: Int32, valid: Boolean, chunk: Int32, words: list[Int32]
    ):
        """The 8 columns of ``chunk``; if ``valid``."""
        if valid:
            copies.store_words(self.address(tensors, tile.token, tile.head + row, chunk * 8), words)


class Epilogue:
    """``half``: index of the warpgroup; ``output`` stores."""

    def __init__(self, config: Config, half: int, output: DenseOutput | Fp4Output):
        self.c, self.half, self.output = config, half, output

    @cute.jit
    def store(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, w: Fragments):
        """Store this warpgroup's columns of the result."""
        c = self.c
        heads = [cutlass.min(wgmma.first_row(w.thread) + 8 * r, tile.heads - 1) + tile.head for r in range(2)]
        sinks = [sink_of(tensors, scalars, head) for head in heads]  # loads overlap
        maxima, sums, factors = self.sums(shared, w)
        lane = w.thread & 31
        for r in cutlass.range_constexpr(2):
            row = wgmma.first_row(w.thread) + 8 * r
            head = heads[r]
            factor = factor_beside(scalars, sinks[r], maxima[r], sums[r]) * factors[r]
            valid, run = row < tile.heads, const_expr(self.output.run)
            for g in cutlass.range_constexpr(c.ring.part // (4 * run)):
                words = [self._words(w, g * run // 2 + i, run // 8, r, factor) for i in range(run // 8)]
                column = const_expr(self.half * c.ring.part + g * 4 * run)
                self.output.store(tensors, tile, row, valid, column, [word for four in words for word in four])
            if const_expr(self.half == 0):
                if valid & ((lane & 3) == 0):
                    self.output.store_stats(tensors, scalars, tile.token, head, maxima[r], sums[r])

    @cute.jit
    def sums(self, shared: Int32, w: Fragments):
        """Row maxima over both warpgroups, the sums relative to them, and the factors that rescale O. After this no
        warpgroup reads Q or the ring."""
        sSums, sPeaks = (by_head(region, shared) for region in (self.c.shared.sums, self.c.shared.peaks))
        own = [wgmma.lanes_sum(w.rSum[r]) for r in range(2)]
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sSums[row + 8 * r, self.half], sPeaks[row + 8 * r, self.half] = own[r], w.rPeak[r]
        sync_consumers()
        maxima = [cute.arch.fmax(sPeaks[row + 8 * r, 0], sPeaks[row + 8 * r, 1]) for r in range(2)]
        factors = [exp2(w.rMax[r] - finite(maxima[r])) for r in range(2)]
        # In the same order in both warpgroups: the same bits.
        sums = [(sSums[row + 8 * r, 0] + sSums[row + 8 * r, 1]) * factors[r] for r in range(2)]
        return maxima, sums, factors

    @cute.jit
    def _words(
        self, w: Any, first: cutlass.Constexpr, step: cutlass.Constexpr, r: cutlass.Constexpr, factor: Float32
    ):  # fmt: skip
        """16 bytes of a row per lane: lane q of four has group ``first + q step`` of 8 columns."""
        pairs = [4 * (first + j * step) + 2 * r for j in range(4)]
        words = [op.pack(self.c.dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i in pairs]
        return softmax.transpose_quads(words, w.thread & 3)
