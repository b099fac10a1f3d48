"""What the roles with rows share: the walk of the softmax, the mask, the scales of codes.

Thread i of a warpgroup has lane i of tensor memory; which row that is, and which of its columns, say the parts for one
CTA and for two.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import softmax, tmem

from ..types import Inputs, Scalars
from .scheduler import Scheduler
from .types import ROWS, STATES, Config, SharedMemory, TileRows, WorkTile, factor_stage, new_state

# Columns of the output that a correction thread holds at a time; with 32 it spills in a pair, and where it stores
# float32, for a split of the keys, with 16 too.
CHUNK = 16


def lane() -> Int32:
    """This thread's lane of tensor memory: its number in its warpgroup."""
    return cute.arch.thread_idx()[0] % ROWS


def arrive(barrier: cute.Pointer, shared: bool = False) -> None:
    """Once for the warp, after all its lanes.

    Loads and stores of tensor memory, and the waits for them, are the whole warp's. What its lanes have read from or
    written to ``shared`` memory on their own has to be brought together first.
    """
    if const_expr(shared):
        cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


class Softmax(Fixed):
    """The role: scores to probabilities, and the rows' maxima and sums. ``block`` does so for one block of keys."""

    def __init__(self, config: Config, scheduler: Scheduler, rows: Any, block: Any):
        self.c, self.scheduler, self.rows, self.block = config, scheduler, rows, block

    @cute.jit
    def run(self, ins: Inputs, scalars: Scalars, smem: SharedMemory, warp: Int32):
        """One warpgroup for each tile."""
        c = self.c
        if const_expr(c.tiles == 1):
            self._tile(ins, scalars, smem, warp, 0)
        elif warp < 4:
            self._tile(ins, scalars, smem, warp, 0)
        else:
            self._tile(ins, scalars, smem, warp, 1)

    @cute.jit
    def _tile(self, ins: Inputs, scalars: Scalars, smem: SharedMemory, warp: Int32, t: cutlass.Constexpr):
        c = self.c
        rings, sTile, sFinals = smem.rings, smem.sTile, smem.sFinals
        row = lane()
        state = new_state()
        fill, n = Int32(0), Int32(0)
        tile = self.scheduler.read(rings.tile, sTile, fill)
        while tile.row >= 0:
            visit = self.scheduler.key_blocks(tile, scalars)
            position = tile.shift + self.rows.token_of(tile, t, row)
            at = TileRows(scaled(c, ins, scalars, tile), smem, warp, tile, position, state)
            self.block.probabilities(at, t, n, visit.block(Int32(0)), "first")
            if const_expr(c.causal or c.window):
                for i in cutlass.range(1, visit.full, unroll=1):
                    self.block.probabilities(at, t, n + i, visit.block(i), "both")
            for i in cutlass.range(visit.full, visit.full_end, unroll=1):
                self.block.probabilities(at, t, n + i, visit.block(i), "")
            if const_expr(c.kv_start or c.window):
                for i in cutlass.range(visit.full_end, visit.steps, unroll=1):
                    self.block.probabilities(at, t, n + i, visit.block(i), "left")
            for k in cutlass.range_constexpr(STATES):
                sFinals[row, k, 2 * t + (fill & 1)] = state[k]
            n += visit.steps
            stage, _ = factor_stage(c, t, n - 1)
            arrive(rings.factors.full + stage, shared=True)
            fill += 1
            tile = self.scheduler.read(rings.tile, sTile, fill)


def scaled(c: Config, ins: Inputs, scalars: Scalars, tile: WorkTile) -> Scalars:
    """The scalars of a tile's scores, which are products of E4M3 codes: with the scales of q and k."""
    if const_expr(not any(c.scales[:2])):
        return scalars
    both = Float32(1.0)
    for scale in ins.scales[:2]:
        if const_expr(scale is not None):
            both *= scale_of(c, ins, scale, tile)
    if const_expr(c.softcap):
        return scalars._replace(cap_slope=scalars.cap_slope * both)
    return scalars._replace(scale_log2=scalars.scale_log2 * both)


def scale_of(c: Config, ins: Inputs, scale: cute.Tensor, tile: WorkTile) -> Float32:
    """A tile's entry of a scale (sequences, Hkv); of what lies behind the last sequence the last one's."""
    heads = scale.shape[1]
    group = Int32(ins.q.shape[1 if c.varlen else 2]) // Int32(heads) // c.group
    return Float32(scale[cutlass.min(tile.batch, Int32(scale.shape[0]) - 1), tile.head // group])


def masked(
    c: Config, s: list, scalars: Scalars, tile: WorkTile, block: Int32, position: Int32, edge: str
) -> list[Float32]:
    """-inf for keys that the row at ``position`` must not see.

    ``edge``: where a limit of what the rows see may cross the block: "first", which is any in a tile's first block,
    "both", or "left" where the right one cannot.
    """
    origin = block * c.tile_n
    start, stop = tile.start - origin, tile.end - origin
    low = high = sinks_end = end = None
    if const_expr(edge != "left"):
        end = cutlass.min(stop, position + 1 - origin) if c.causal else stop
    if const_expr(c.window):
        low = cutlass.max(start, position - scalars.window + 1 - origin)
        if const_expr(edge != "left" and not c.causal):
            high = position + scalars.window - origin
        if const_expr(c.sink_tokens):
            sinks_end = cutlass.min(start + scalars.sink_tokens, stop)
    elif const_expr(c.kv_start):
        low = start
    return softmax.masked(s, softmax.MaskBounds(low, high, start if c.kv_start else None, sinks_end, end))


@cute.jit
def rescale(c: cutlass.Constexpr, factor: Float32, t: cutlass.Constexpr, warp: Int32):
    """The output of tile t times the rows' factors, unless all of the warp's are 1."""
    tmem.after_sync()
    if cute.arch.vote_any_sync(factor < 1.0):
        for at in cutlass.range_constexpr(0, c.columns, CHUNK):
            base = tmem.lanes(Int32(c.outputs[t] + at), warp)
            values = tmem.load(base, CHUNK)
            tmem.store(base, softmax.rescaled(values, factor))
        tmem.await_stores()
    tmem.before_sync()
