"""How all roles of a Blackwell prefill kernel walk through the same work tiles, and which keys each of them visits.

The grid is persistent. The loading warp finds the next work tile and leaves a note about it in shared memory, in a ring
of two; every other warp reads the note.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from torch_attnkit.cuda.ring import Fixed, Ring

from ..key_blocks import KeyBlocks, MaskedKeys, Sequence, TileScheduler, dense, key_blocks_of, masked_keys, packed
from ..types import Inputs, Outputs, Scalars
from .split import blocks_of_split, has_keys
from .types import Config, WorkTile


class Scheduler(Fixed):
    def __init__(self, config: Config):
        self.c = config

    def tiles(self, ins: Inputs, outs: Outputs, scalars: Scalars) -> TileScheduler:
        """All work tiles of a call."""
        c = self.c
        heads = Int32(ins.q.shape[1 if c.varlen else 2]) // c.group
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // c.cluster_rows + Int32(ins.low.shape[0])
            return TileScheduler(slots, heads, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.cluster_rows - 1)) // c.cluster_rows
        return TileScheduler(rows, heads, Int32(outs.out.shape[0] if c.split else ins.q.shape[0]), scalars.section)

    @cute.jit
    def work_tile(self, ins: Inputs, tiles: TileScheduler, n: Int32):
        """The n-th work tile, with row -1 if there is none, and its sequence's first key. A whole warp calls this."""
        c = self.c
        if const_expr(c.varlen):
            slot, head = n // tiles.heads, n % tiles.heads
            if const_expr(c.causal):
                slot = tiles.rows - 1 - slot
            sizes = (Int32(ins.q.shape[0]), Int32(ins.k.shape[0]))
            row, number, k0, seq = packed((ins.low, ins.high), *sizes, slot, c.cluster_rows)
            return WorkTile(row, head, number, *seq, Int32(0), Int32(1)), k0
        row, head, batch = tiles.work_tile(n, c.uneven)
        split, num_splits = Int32(0), Int32(1)
        if const_expr(c.split):
            sequences = Int32(ins.q.shape[0])
            split, batch, num_splits = batch // sequences, batch % sequences, tiles.batches // sequences
        return WorkTile(row, head, batch, *dense(c, ins, batch), split, num_splits), Int32(0)

    @cute.jit
    def wanted(self, ins: Inputs, outs: Outputs, scalars: Scalars, tile: WorkTile) -> Boolean:
        """Whether a work tile has queries and, of a split of the keys, blocks. A whole warp calls this."""
        c = self.c
        wanted = (tile.row >= 0) & (tile.row * c.cluster_rows < tile.tokens)
        if const_expr(c.split):
            wanted = has_keys(c, outs, tile, self.key_blocks(tile, scalars), Int32(ins.q.shape[0]))
        return wanted

    def key_blocks(self, tile: WorkTile, scalars: Scalars) -> KeyBlocks:
        """The blocks that the queries of a work tile need, together; or this split of them."""
        c = self.c
        blocks = key_blocks_of(c, _sequence(tile), tile.row * c.cluster_rows, c.cluster_rows, scalars)
        return blocks_of_split(blocks, tile.split, tile.num_splits) if c.split else blocks

    def masked_keys(self, tile: WorkTile, scalars: Scalars) -> MaskedKeys:
        return masked_keys(self.c, _sequence(tile), scalars)

    def leave(self, ring: Ring, sTile: cute.Tensor, n: Int32, tile: WorkTile) -> None:
        """Note the n-th work tile of this CTA."""
        full = ring.await_empty(n)
        with cute.arch.elect_one():
            for i, value in enumerate(tile):
                sTile[i, ring.slot(n)] = value
            cute.arch.mbarrier_arrive(full)

    def read(self, ring: Ring, sTile: cute.Tensor, n: Int32) -> WorkTile:
        """The n-th work tile of this CTA, for every warp but the one that leaves it."""
        ring.wait(n)
        fields = range(len(WorkTile._fields))
        tile = WorkTile(*(cute.arch.make_warp_uniform(sTile[i, ring.slot(n)]) for i in fields))
        cute.arch.sync_warp()
        ring.release(n)
        return tile


def _sequence(tile: WorkTile) -> Sequence:
    return Sequence(tile.q0, tile.tokens, tile.shift, tile.start, tile.end)
