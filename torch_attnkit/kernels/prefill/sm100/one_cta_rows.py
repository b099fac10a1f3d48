"""Softmax of a block, and correction, where a CTA computes its tiles alone: a thread has a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import softmax, tmem

from ..key_blocks import MaskedKeys
from ..types import Inputs, Outputs, Scalars
from .epilogue import Epilogue
from .rows import arrive, lane, masked, rescale
from .scheduler import Scheduler
from .types import (
    ROW_MAX,
    ROW_SUM,
    ROWS,
    TRUE_MAX,
    OneCta,
    SharedMemory,
    TileRows,
    WorkTile,
    factor_stage,
    score_buffer,
)


class OneCtaRows(Fixed):
    """Thread i of a warpgroup has row i of its tile, which is lane i of tensor memory."""

    def __init__(self, config: OneCta):
        self.c = config

    def row(self) -> Int32:
        """The row of a tile that this thread has."""
        return lane()

    def token_of(self, tile: WorkTile, t: int, row: Int32) -> Int32:
        """The token that a row of tile t has, within its sequence."""
        first = (tile.row * self.c.ctas + cute.arch.block_idx()[0] % self.c.ctas) * self.c.rows
        return first + (ROWS * t + row) // self.c.group

    def writes_stats(self, valid: cutlass.Boolean) -> cutlass.Boolean:
        """Whether this thread writes its row's LSE and sum."""
        return valid

    def element(self, at: int) -> int:
        """Which element of the row stands in column ``at`` of an output."""
        return at


class OneCtaBlock(Fixed):
    def __init__(self, config: OneCta):
        self.c = config

    @cute.jit
    def probabilities(self, at: TileRows, t: cutlass.Constexpr, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Block n's probabilities in place of its scores, and what the output so far must be multiplied by.

        ``edge``: as ``masked`` has it, or "" where no limit crosses the block.
        """
        c = self.c
        scalars, rings, state = at.scalars, at.smem.rings, at.state
        buffer, phase = score_buffer(c, t, n)
        cute.arch.mbarrier_wait(rings.scores.full + buffer, phase)
        tmem.after_sync()
        base = tmem.lanes(buffer * c.tile_n + Int32(c.scores[0]), at.warp)
        s = tmem.load(base, c.tile_n)
        if const_expr(c.softcap):
            s = softmax.capped(s, scalars.cap_slope)
        if const_expr(edge != ""):
            s = masked(c, s, scalars, at.tile, block, at.position, edge)
        if const_expr(edge == "first"):
            row_max = softmax.row_max(s, -Float32.inf)
            true_max, row_sum = row_max, Float32(0.0)
        else:
            old = state[ROW_MAX]
            row_max = softmax.row_max(s, old)
            true_max = cute.arch.fmax(state[TRUE_MAX], row_max)
            lag = softmax.CODES_LAG if c.codes else softmax.LAG
            row_max, factor = softmax.followed(old, row_max, scalars.scale_log2, lag)
            row_sum = state[ROW_SUM] * factor
            stage, _ = factor_stage(c, t, n - 1)
            at.smem.sFactors[lane(), stage] = factor
            arrive(rings.factors.full + stage, shared=True)
        if const_expr(c.normalize):
            offset = cutlass.select_(row_max == -Float32.inf, Float32(0.0), -row_max * scalars.scale_log2)
            p = softmax.probabilities(s, scalars.scale_log2, offset, c.eighths)
        else:
            safe = cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)
            p = softmax.exact_probabilities(s, scalars.scale_log2, safe, c.eighths)
        tmem.store(base, softmax.packed(p, c.dtype))
        tmem.await_stores()
        tmem.before_sync()
        arrive(rings.scores.empty + buffer)
        state[ROW_MAX], state[ROW_SUM] = row_max, softmax.row_sum(p, row_sum)
        if const_expr(not c.normalize):
            state[TRUE_MAX] = true_max


class OneCtaCorrection(Fixed):
    """The role: keeps the outputs in step with what the rows subtract, and stores them."""

    def __init__(self, config: OneCta, scheduler: Scheduler, epilogue: Epilogue):
        self.c, self.scheduler, self.epilogue = config, scheduler, epilogue

    @cute.jit
    def run(self, ins: Inputs, outs: Outputs, scalars: Scalars, smem: SharedMemory, warp: Int32):
        """One warpgroup, for the outputs of all tiles."""
        c = self.c
        rings, sTile, sFactors, sFinals = smem.rings, smem.sTile, smem.sFactors, smem.sFinals
        row = lane()
        fill, n = Int32(0), Int32(0)
        tile = self.scheduler.read(rings.tile, sTile, fill)
        while tile.row >= 0:
            visit = self.scheduler.key_blocks(tile, scalars)
            for i in cutlass.range(0, visit.steps, unroll=1):
                if const_expr(c.tiles == 1):
                    if i > 0:
                        cute.arch.mbarrier_wait(rings.output.full, (n + i - 1) & 1)
                for t in cutlass.range_constexpr(c.tiles):
                    if i > 0:
                        stage, phase = factor_stage(c, t, n + i - 1)
                        cute.arch.mbarrier_wait(rings.factors.full + stage, phase)
                        rescale(c, sFactors[row, stage], t, warp)
                        # The lanes have read their factors, which are free for others once one lane arrives for all.
                        cute.arch.sync_warp()
                    if const_expr(c.padded and t == 0):
                        # Not before the waits above: they say that V's last fill of this stage is over and done with,
                        # without which a wait for the parity of this one would not mean this one.
                        masked_out = self.scheduler.masked_keys(tile, scalars)
                        self._clear_rows(rings.v, n + i, masked_out, visit.block(i), smem.sV)
                    buffer, _ = score_buffer(c, t, n + i)
                    arrive(rings.scores.empty + buffer)
            n += visit.steps
            for t in cutlass.range_constexpr(c.tiles):
                stage, phase = factor_stage(c, t, n - 1)
                cute.arch.mbarrier_wait(rings.factors.full + stage, phase)
                phase = (n - 1) & 1 if c.tiles == 1 else fill & 1
                cute.arch.mbarrier_wait(rings.output.full + t, phase)
                tmem.after_sync()
                final = sFinals[row, None, 2 * t + (fill & 1)]
                self.epilogue.store(ins, outs, scalars, tile, t, final, warp)
            tmem.before_sync()
            fill += 1
            tile = self.scheduler.read(rings.tile, sTile, fill)

    @cute.jit
    def _clear_rows(self, ring: Ring, n: Int32, masked_out: MaskedKeys, block: Int32, sV: cute.Tensor):
        """Write 0 over the rows of V's block at which nobody looks, before the tensor cores read them."""
        c = self.c
        low = block * c.tile_n
        if masked_out.overlap(low, low + c.tile_n):
            ring.wait(n)
            zero, k_dim = c.dtype(0.0), 256 // c.dtype.width  # keys of one product
            for key in cutlass.range(lane(), c.tile_n, ROWS, unroll=1):
                if masked_out.hold(low + key):
                    for d in cutlass.range(0, c.dim_v, unroll=8):
                        sV[(d, key % k_dim), 0, key // k_dim, ring.slot(n)] = zero
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()  # one lane arrives for all
