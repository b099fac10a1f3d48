"""Softmax of a block, and correction, where two CTAs compute a tile: two threads have a row.

Threads i and i + 64 of a warpgroup have row i of the CTA's 64, which are lanes i and i + 64 of tensor memory: the first
has the first half of a block's keys and of each product's columns, the other the second. They agree on a maximum
through shared memory, block by block, and keep sums of their own, which are added up at a tile's end.
"""

import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import softmax, tmem

from ..key_blocks import MaskedKeys
from ..types import Inputs, Outputs, Scalars
from .epilogue import Epilogue
from .rows import arrive, lane, masked, rescale
from .scheduler import Scheduler
from .types import (
    CTAS,
    HALF,
    LANES,
    ROW_MAX,
    ROW_SUM,
    TRUE_MAX,
    Rings,
    SharedMemory,
    TileRows,
    TwoCta,
    WorkTile,
    element,
    factor_stage,
    new_state,
    score_buffer,
)


class Barrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's."""

    MAXIMA = 1  # + warp % 2: the two warps that have the same rows have left their maxima


class TwoCtaRows(Fixed):
    """Lanes i and i + 64 of tensor memory have row i of the CTA's half of the tile."""

    def __init__(self, config: TwoCta):
        self.c = config

    def row(self) -> Int32:
        return LANES * (cute.arch.block_idx()[0] % CTAS) + lane() % LANES

    def token_of(self, tile: WorkTile, t: int, row: Int32) -> Int32:
        pair = cute.arch.block_idx()[0] // CTAS % self.c.ctas
        return (tile.row * self.c.ctas + pair) * self.c.rows + self.row() // self.c.group

    def writes_stats(self, valid: cutlass.Boolean) -> cutlass.Boolean:
        return valid & (lane() < LANES)

    def element(self, at: int) -> Int32:
        return element(at, lane() // LANES)


def _arrive_at_leader(c: TwoCta, barrier: cute.Pointer) -> None:
    """Arrive once for the warp at a barrier of the CTA that issues the pair's products.

    What its lanes wrote to this CTA's shared memory is then read by products that the other CTA issued.
    """
    cute.arch.sync_warp()
    leader = cute.arch.block_idx()[0] % c.cluster & -CTAS
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, leader, scope=nvvm.MemScopeKind.CLUSTER)


class TwoCtaBlock(Fixed):
    def __init__(self, config: TwoCta):
        self.c = config

    @cute.jit
    def probabilities(self, at: TileRows, t: cutlass.Constexpr, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Block n's probabilities into shared memory, and what the output so far must be multiplied by.

        ``edge``: as ``masked`` has it, or "" where no limit crosses the block.
        """
        c = self.c
        scalars, smem, rings, state = at.scalars, at.smem, at.smem.rings, at.state
        thread, keys = lane(), c.tile_n // 2
        half = thread // LANES
        buffer, phase = score_buffer(c, t, n)
        cute.arch.mbarrier_wait(rings.scores.full + buffer, phase)
        tmem.after_sync()
        s = tmem.load(tmem.lanes(buffer * keys + Int32(c.scores[0]), at.warp), keys)
        if const_expr(c.softcap):
            s = softmax.capped(s, scalars.cap_slope)
        if const_expr(edge != ""):
            # The thread's keys seen as a block of their own: everything else lies nearer by their distance.
            near = half * keys
            moved = at.tile._replace(start=at.tile.start - near, end=at.tile.end - near)
            s = masked(c, s, scalars, moved, block, at.position - near, edge)
        row_max = softmax.row_max(s, -Float32.inf if edge == "first" else state[ROW_MAX])
        smem.sMaxima[thread, n & 1] = row_max
        cute.arch.barrier(barrier_id=int(Barrier.MAXIMA) + at.warp % 2, number_of_threads=64)
        row_max = cute.arch.fmax(row_max, smem.sMaxima[thread ^ LANES, n & 1])
        true_max, row_sum = row_max, Float32(0.0)
        if const_expr(edge != "first"):
            true_max = cute.arch.fmax(state[TRUE_MAX], row_max)
            lag = softmax.CODES_LAG if c.codes else softmax.LAG
            row_max, factor = softmax.followed(state[ROW_MAX], row_max, scalars.scale_log2, lag)
            row_sum = state[ROW_SUM] * factor
            stage, _ = factor_stage(c, t, n - 1)
            smem.sFactors[thread, stage] = factor
            arrive(rings.factors.full + stage, shared=True)
        if const_expr(c.normalize):
            offset = cutlass.select_(row_max == -Float32.inf, Float32(0.0), -row_max * scalars.scale_log2)
            p = softmax.probabilities(s, scalars.scale_log2, offset, c.eighths)
        else:
            safe = cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)
            p = softmax.exact_probabilities(s, scalars.scale_log2, safe, c.eighths)
        words = softmax.packed(p, c.dtype)
        if const_expr(edge != "first"):
            # The last product has read the last P. A tile's first scores come after it anyway.
            cute.arch.mbarrier_wait(rings.output.full, (n - 1) & 1)
        self._keep(smem.sP, words, half)
        cute.arch.fence_view_async_shared()
        tmem.before_sync()
        _arrive_at_leader(c, rings.scores.empty + buffer)
        state[ROW_MAX], state[ROW_SUM] = row_max, softmax.row_sum(p, row_sum)
        if const_expr(not c.normalize):
            state[TRUE_MAX] = true_max

    def _keep(self, sP: cute.Tensor, words: list, half: Int32) -> None:
        """A row's half of the probabilities where the products look for it: 128 bytes, a part, or half of that.

        With 128-byte swizzling row r's 16 bytes number j lie at number j ^ r % 8 (PTX ISA, "Swizzling Modes").
        """
        row = lane() % LANES
        part, first = (half, 0) if self.c.parts == 2 else (0, half * (len(words) // 4))
        line = sP.iterator.toint() + (part * LANES + row) * 128
        for j in range(0, len(words), 4):
            at = (first + j // 4) ^ (row & 7)
            copies.store_words(line + at * 16, words[j : j + 4], cute.AddressSpace.smem)


class TwoCtaCorrection(Fixed):
    """The role: keeps the output in step with what the rows subtract, waits for V, and stores."""

    def __init__(self, config: TwoCta, scheduler: Scheduler, epilogue: Epilogue):
        self.c, self.scheduler, self.epilogue = config, scheduler, epilogue

    @cute.jit
    def run(self, ins: Inputs, outs: Outputs, scalars: Scalars, smem: SharedMemory, warp: Int32):
        """One warpgroup in both CTAs.

        Each CTA waits for its own half of V, which it may have to clear, and lets the pair's products begin.
        """
        c = self.c
        rings, sTile, sFactors, sFinals = smem.rings, smem.sTile, smem.sFactors, smem.sFinals
        thread = lane()
        fill, n = Int32(0), Int32(0)
        tile = self.scheduler.read(rings.tile, sTile, fill)
        while tile.row >= 0:
            visit = self.scheduler.key_blocks(tile, scalars)
            for i in cutlass.range(0, visit.steps, unroll=1):
                if i > 0:
                    self._await_block(rings, n + i - 1)
                    rescale(c, sFactors[thread, factor_stage(c, 0, n + i - 1)[0]], 0, warp)
                # Not before the waits above: they say that V's last fills are over and done with, without which a wait
                # for the parity of these would not mean these.
                for part in cutlass.range_constexpr(c.v_pieces):
                    rings.v.wait((n + i) * c.v_pieces + part)
                if const_expr(c.padded):
                    masked_out = self.scheduler.masked_keys(tile, scalars)
                    self._clear_rows(rings.v, n + i, masked_out, visit.block(i), smem.sV)
                _arrive_at_leader(c, rings.scores.empty + score_buffer(c, 0, n + i)[0])
            n += visit.steps
            self._await_block(rings, n - 1)
            tmem.after_sync()
            final = new_state()
            for k in cutlass.range_constexpr(cute.size(final)):
                final[k] = sFinals[thread, k, fill & 1]
            final[ROW_SUM] += sFinals[thread ^ LANES, ROW_SUM, fill & 1]
            self.epilogue.store(ins, outs, scalars, tile, 0, final, warp)
            tmem.before_sync()
            fill += 1
            tile = self.scheduler.read(rings.tile, sTile, fill)

    def _await_block(self, rings: Rings, n: Int32) -> None:
        """Until block n's output is whole, and what the softmax says about it is there."""
        cute.arch.mbarrier_wait(rings.output.full, n & 1)
        stage, phase = factor_stage(self.c, 0, n)
        cute.arch.mbarrier_wait(rings.factors.full + stage, phase)

    @cute.jit
    def _clear_rows(self, ring: Ring, n: Int32, masked_out: MaskedKeys, block: Int32, sV: cute.Tensor):
        """Write 0 over this CTA's part of the rows of V at which nobody looks, before the products."""
        c = self.c
        low = block * c.tile_n
        if masked_out.overlap(low, low + c.tile_n):
            key = lane()
            if masked_out.hold(low + key):
                zero, k_dim = c.dtype(0.0), 256 // c.dtype.width  # keys of one product
                for h in cutlass.range_constexpr(c.halves):
                    slot = ring.slot(n * c.v_pieces + c.parts * h + key // c.part)
                    for d in cutlass.range(0, HALF // 2, unroll=8):
                        sV[(d, key % k_dim), 0, key % c.part // k_dim, slot] = zero
            cute.arch.fence_view_async_shared()
