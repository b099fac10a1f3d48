"""What a consumer warpgroup does with its output when a work tile's last key is through."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.sm90 import wgmma as products
from torch_attnkit.cuda.warp_ops import exp2

from .arguments import Numbers, Tensors
from .config import Config
from .fp4_output import Fp4Output
from .inbox import Inbox
from .mainloop import Fragments
from .meeting import Meeting, by_head, meet
from .output import Output, factor_beside, inverse, sink_of
from .schedule import WorkTile


@dsl_user_op
def _store_tiles(address: Int32, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """Four tiles of 8 x 8 numbers of 16 bits, of which a lane has the pair of row ``lane // 4``, to shared memory. Lane
    l gives the address of row ``l % 8``, 16 bytes, of tile ``l // 8``."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    asm(None, [address, *words], text, memory=True, loc=loc, ip=ip)


class Results:
    """The epilogue of a consumer warpgroup."""

    def __init__(self, config: Config, half: int, output: Output | Fp4Output):
        self.c, self.half, self.output = config, half, output

    @cute.jit
    def store(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, shared: Int32, w: Fragments):
        """This warpgroup's columns of the result."""
        c = self.c
        heads = [cutlass.min(products.first_row(w.thread) + 8 * r, tile.heads - 1) + tile.head for r in range(2)]
        sinks = [sink_of(tensors, numbers, head) for head in heads]  # on their way, together
        maxima, sums, factors = self._sums(shared, w)
        lane = w.thread & 31
        for r in cutlass.range_constexpr(2):
            row = products.first_row(w.thread) + 8 * r
            head = heads[r]
            factor = factor_beside(numbers, sinks[r], maxima[r], sums[r]) * factors[r]
            there, run = row < tile.heads, const_expr(self.output.run)
            for g in cutlass.range_constexpr(c.ring.part // (4 * run)):
                words = [self._words(w, g * run // 2 + i, run // 8, r, factor) for i in range(run // 8)]
                column = const_expr(self.half * c.ring.part + g * 4 * run)
                self.output.store(tensors, tile, row, there, column, [word for four in words for word in four])
            if const_expr(self.half == 0):
                if there & ((lane & 3) == 0):
                    self.output.store_stats(tensors, numbers, tile.token, head, maxima[r], sums[r])

    @cute.jit
    def send(self, tile: WorkTile, shared: Int32, meeting: Meeting, inbox: Inbox, w: Fragments):
        """This warpgroup's columns of a partial result to the CTAs of the cluster that add up its rows."""
        self.send_sums(tile, meeting, inbox, w, self._sums(shared, w))

    @cute.jit
    def send_sums(self, tile: WorkTile, meeting: Meeting, inbox: Inbox, w: Any, known: Any):
        """The same, whose maxima and sums are ``known``, and the factors that bring the output there."""
        c, (maxima, sums, factors) = self.c, known
        thread, lane = cute.arch.thread_idx()[0], w.thread & 31
        factors = [inverse(sums[r], sums[r]) * factors[r] for r in range(2)]
        # Lane l says where row l % 8 of the l // 8-th of four tiles of 8 x 8 goes, of which two lie below one another.
        row = w.thread // 32 * 16 + (lane & 15)
        at = inbox.own(row) + (self.half * c.ring.part + lane // 16 * 8) * c.itemsize
        for g in cutlass.range_constexpr(0, c.ring.part // 8, 2):
            pairs = [(4 * (g + j) + 2 * r, factors[r]) for j in range(2) for r in range(2)]
            words = [op.pack(c.dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i, factor in pairs]
            _store_tiles(at + g * (8 * c.itemsize), words)
        if const_expr(self.half == 0):
            if (lane & 3) == 0:
                for r in cutlass.range_constexpr(2):
                    stats = [maxima[r].bitcast(Int32), sums[r].bitcast(Int32), Int32(0), Int32(0)]
                    behind = inbox.own(products.first_row(w.thread) + 8 * r) + const_expr(c.dim * c.itemsize)
                    copies.store_words(behind, stats, cute.AddressSpace.smem)
        cute.arch.fence_view_async_shared()
        meet()
        if thread < tile.heads:
            meeting.await_read()
            inbox.send(meeting, thread)

    @cute.jit
    def _sums(self, shared: Int32, w: Fragments):
        """The maxima of both rows over both warpgroups' tiles, the sums that belong to them, and the factors that bring
        the output there. After this, no warpgroup reads query or ring any more."""
        sSums, sPeaks = (by_head(region, shared) for region in (self.c.shared.sums, self.c.shared.peaks))
        mine = [products.lanes_sum(w.rSum[r]) for r in range(2)]
        row, lane = products.first_row(w.thread), w.thread & 31
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sSums[row + 8 * r, self.half], sPeaks[row + 8 * r, self.half] = mine[r], w.rPeak[r]
        meet()
        maxima = [cute.arch.fmax(sPeaks[row + 8 * r, 0], sPeaks[row + 8 * r, 1]) for r in range(2)]
        factors = [exp2(w.rMax[r] - finite(maxima[r])) for r in range(2)]
        # In the same order in both: what they divide by is the same to the bit.
        sums = [(sSums[row + 8 * r, 0] + sSums[row + 8 * r, 1]) * factors[r] for r in range(2)]
        return maxima, sums, factors

    @cute.jit
    def _words(
        self, w: Any, first: cutlass.Constexpr, step: cutlass.Constexpr, r: cutlass.Constexpr, factor: Float32
    ):  # fmt: skip
        """16 bytes of a row: of the groups of 8 columns ``first``, ``first + step`` and so on lane q of four has the
        q-th."""
        pairs = [4 * (first + j * step) + 2 * r for j in range(4)]
        words = [op.pack(self.c.dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i in pairs]
        return softmax.transpose_quads(words, w.thread & 3)
