"""The loading warp of a Blackwell prefill kernel, and the products' tensors as TMA reads them."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda.ring import Fixed

from ..key_blocks import TileScheduler, tile_of_round
from ..types import Inputs, Outputs, Scalars
from .scheduler import Scheduler
from .types import Config, Heads, Layouts, Loads, Mmas, SharedMemory, WorkTile


class Load(Fixed):
    """``copies`` brings what one work tile needs, as one CTA or two CTAs compute it."""

    def __init__(self, config: Config, scheduler: Scheduler, copies: Any):
        self.c, self.scheduler, self.copies = config, scheduler, copies

    def atoms(self, ins: Inputs, layouts: Layouts, mmas: Mmas) -> Loads:
        """TMA of a box of Q, K and V each.

        With products of two CTAs loads of Q and K complete on the first CTA's barriers, V's on each CTA's own.
        """
        c = self.c
        tiler_qk, tiler_pv = c.tilers
        modes = [0, 2, 1] if c.varlen else [1, 3, 2, 0]
        token_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        dim_first = [modes[1], modes[0], *modes[2:]]
        token_last = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=dim_first))
        one = lambda layout: cute.select(layout, mode=[0, 1, 2])
        load = cpasync.CopyBulkTensorTileG2SOp
        load_kv = cpasync.CopyBulkTensorTileG2SMulticastOp if c.pair else load
        # What shares a cluster's keys differs in M, so it shares B.
        by_row = (c.cluster // c.ctas, c.ctas, 1, 1)
        atom_a, atom_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        q_rows = self._grouped(token_first(ins.q))
        q_atom, q = atom_a(load(c.cta_group), q_rows, one(layouts.q), tiler_qk, mmas.qk)
        k_atom, k = atom_b(load_kv(c.cta_group), token_first(ins.k), one(layouts.k), tiler_qk, mmas.qk, by_row)
        v_op = load_kv(tcgen05.CtaGroup.ONE)
        v_atom, v = atom_b(v_op, token_last(ins.v), one(layouts.v), tiler_pv, mmas.pv, by_row)
        return Loads(q_atom, q, k_atom, k, v_atom, v)

    def _grouped(self, q: cute.Tensor) -> cute.Tensor:
        """(T, D, Hq, ...) as ((group, T), D, Hkv, ...)."""
        group = self.c.group
        if const_expr(group == 1):
            return q
        tokens, dim, heads, *batch = q.shape
        by_token, by_element, by_head, *by_batch = q.stride
        shape = ((group, tokens), dim, heads // group, *batch)
        return cute.make_tensor(
            q.iterator, cute.make_layout(shape, stride=((by_head, by_token), by_element, by_head * group, *by_batch))
        )

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
        mask = self.copies.multicast()
        number, fills, n = Int32(0), Int32(0), Int32(0)  # rounds, tiles loaded, and blocks of keys loaded so far
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis]) // c.group
        at = tile_of_round(Int32(0), cluster, clusters)
        while at < tiles.num_tiles():
            tile, k0 = self.scheduler.work_tile(ins, tiles, at)
            if self.scheduler.wanted(ins, outs, scalars, tile):
                self.scheduler.leave(smem.rings.tile, smem.sTile, fills, tile)
                visit = self.scheduler.key_blocks(tile, scalars)
                heads = self._heads(loads, group, tile, k0)
                self.copies.load_tile(loads, heads, mmas, smem, mask, tile, visit, fills, n)
                n += visit.steps
                fills += 1
            number += 1
            at = tile_of_round(number, cluster, clusters)
        none = Int32(0)
        last = WorkTile(Int32(-1), *[none] * (len(WorkTile._fields) - 1))
        self.scheduler.leave(smem.rings.tile, smem.sTile, fills, last)

    def _heads(self, loads: Loads, group: Int32, tile: WorkTile, k0: Int32) -> Heads:
        c = self.c
        kv_head = tile.head // group
        heads = zip((loads.q, loads.k, loads.v), (tile.head, kv_head, kv_head), strict=True)
        if const_expr(not c.varlen):
            return Heads(*[t[None, None, head, tile.batch] for t, head in heads])
        first = ((tile.q0 if c.group == 1 else (0, tile.q0), 0), (k0, 0), (0, k0))
        return Heads(*[cute.domain_offset(at, t[None, None, head]) for at, (t, head) in zip(first, heads, strict=True)])
