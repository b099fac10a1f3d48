"""The loading warp of Blackwell's prefill over pages.

It takes the place of ``load.py``'s; all other warps are those of packed sequences, which know no pages: stages of K and
V hold blocks of keys, or pieces of them, as if they had come at once (``paged_copies.py``).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda.ring import Fixed

from ..key_blocks import TileScheduler, packed, tile_of_round
from ..types import Inputs, Outputs, Scalars
from .load import Load
from .paged_types import Paging
from .scheduler import Scheduler
from .types import Config, Layouts, Loads, Mmas, SharedMemory, WorkTile


class PagedLoad(Fixed):
    """``copies`` brings what one work tile needs."""

    def __init__(self, config: Config, paging: Paging, scheduler: Scheduler, load: Load, copies: Any):
        self.c, self.paging, self.scheduler, self.copies = config, paging, scheduler, copies
        self.queries = load  # of packed sequences: Q's rows

    def atoms(self, ins: Inputs, layouts: Layouts, mmas: Mmas) -> Loads:
        """TMA of a tile of Q, and of K's and V's pages."""
        rows = cute.make_tensor(ins.q.iterator, cute.select(ins.q.layout, mode=[0, 2, 1]))  # (T, D, Hq)
        layout = cute.select(layouts.q, mode=[0, 1, 2])
        tiler, load = self.c.tilers[0], cpasync.CopyBulkTensorTileG2SOp(self.c.cta_group)
        q = cute.nvgpu.make_tiled_tma_atom_A(load, self.queries._grouped(rows), layout, tiler, mmas.qk)
        return Loads(*q, *self.copies.keys.atoms(ins))

    @cute.jit
    def run(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        tiles: TileScheduler,
        mmas: Mmas,
        smem: SharedMemory,
    ):
        """One warp: of every work tile the note, the queries and all blocks of K and V."""
        c = self.c
        cluster, clusters = cute.arch.block_idx()[0] // c.cluster, cute.arch.grid_dim()[0] // c.cluster
        number, fills, n = Int32(0), Int32(0), Int32(0)  # rounds, tiles loaded, and blocks of keys loaded so far
        at = tile_of_round(Int32(0), cluster, clusters)
        while at < tiles.num_tiles():
            tile = self.work_tile(ins, tiles, at)
            if (tile.row >= 0) & (tile.row * c.rows < tile.tokens):
                self.scheduler.leave(smem.rings.tile, smem.sTile, fills, tile)
                visit = self.scheduler.key_blocks(tile, scalars)
                self.copies.load_tile(loads, ins, mmas, smem, tile, visit, fills, n)
                n += visit.steps
                fills += 1
            number += 1
            at = tile_of_round(number, cluster, clusters)
        none = Int32(0)
        last = WorkTile(Int32(-1), *[none] * (len(WorkTile._fields) - 1))
        self.scheduler.leave(smem.rings.tile, smem.sTile, fills, last)

    @cute.jit
    def work_tile(self, ins: Inputs, tiles: TileScheduler, n: Int32):
        """The n-th work tile, with row -1 if there is none. A whole warp calls this.

        The offsets of the queries say where it is, as if keys were packed alike, and the length how many keys there
        are, cut off at what a row of the table has room for. What lies behind the last sequence has none.
        """
        c = self.c
        slot, head = n // tiles.heads, n % tiles.heads
        if cutlass.const_expr(c.causal):
            slot = tiles.rows - 1 - slot
        tokens, sequences = Int32(ins.q.shape[0]), Int32(ins.high.kv_len.shape[0])
        row, b, _, seq = packed((ins.low, ins.low), tokens, tokens, slot, c.rows)
        most = Int32(ins.high.table.shape[1]) * self.paging.page
        end = cutlass.max(cutlass.min(Int32(ins.high.kv_len[cutlass.min(b, sequences - 1)]), most), Int32(0))
        end = cutlass.select_(b < sequences, end, Int32(0))
        return WorkTile(row, head, b, seq.q0, seq.tokens, end - seq.tokens, Int32(0), end, Int32(0), Int32(1))
