"""Softmax attention of many queries per sequence on Blackwell: TMA, ``tcgen05`` products, scores in tensor memory.

    loads --Q, K, V--> shared memory          products: S = Q K' and O (+)= P V, one warp, both in tensor memory
    softmax, a warpgroup a tile: S -> P       correction, one warpgroup: O *= factor when a maximum moved; O -> out

Tensor memory holds two buffers of scores, which the probabilities take over in place, and the outputs, so nothing but K
and V moves while a tile runs, and any number of keys is one launch. A CTA has two tiles of 128 rows in flight: the
tensor cores work on one while the other's softmax runs; at head dim 256, where tensor memory holds one output, one tile
whose blocks alternate between the buffers of scores. The heads of a group that divides 128 are packed into a tile's
rows, which read the keys that they share once. Two CTAs may form a ``pair`` on neighbouring tiles: each loads half of
every block for both by TMA multicast, so that the L2 is read half as often. Products are issued in this order, so that
the commit of a block's scores also says that the output of the block before is whole:

    S0(0) S1(0) | O0(0) S0(1) | O1(0) S1(1) | O0(1) S0(2) | ...        one tile: S(0) | S(1) O(0) | S(2) O(1) | ...

The persistent grid, and how its roles walk through tiles, is ``prefill_frame.py``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from ..prefill_tiles import Blocks
from ..ring import rings
from . import tmem
from .prefill_frame import Frame
from .prefill_rows import Rows
from .prefill_types import ROWS, Layouts, Loads, Products


class Prefill(Rows, Frame):
    @cute.jit
    def _barriers(self, memory, warp: Int32):
        """Rings of notes, K and V, and pairs of single mbarriers: see the fields' names."""
        c = self.c
        rows = 4 * c.tiles + 4  # warps that have rows
        table = (
            ("notes", 2, 1, rows + 1),
            ("k", c.stages, 1, c.ctas),
            ("v", c.stages, 1, c.ctas),
            ("q", c.tiles, 1, 1),  # a stage a tile
            ("scores", 2, 1, 8),  # full: S is whole; empty: P is, and the output is ready for it
            ("factors", c.turns * c.tiles, 4, 1),  # full: a softmax group has left its factors or finals; empty unused
            ("output", c.tiles, 1, 1),  # full: the last product of a tile (of one tile: each) is done; empty unused
        )
        return rings(memory, warp, table)

    def _multicast(self) -> dict:
        """Loads to both CTAs of a pair."""
        return {"mcast_mask": cutlass.Int16(3)} if self.c.pair else {}

    @cute.jit
    def _load_tile(self, loads: Loads, heads, products: Products, bars, staged, mask, walk):
        c = self.c
        tile, plan, fills, n = walk
        # Of products of k numbers: ((128, k), 1, D / k, tiles), ((N, k), 1, D / k, stages), ((Dv, k), 1, N / k, stages)
        sQ, sK, sV = staged
        q_head, k_head, v_head = heads
        rank = cute.arch.block_idx()[0] % c.ctas
        qk, pv = products.qk.get_slice(0), products.pv.get_slice(0)
        gK = qk.partition_B(cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0)))
        gV = pv.partition_B(cute.local_tile(v_head, (c.dim_v, c.tile_n), (0, None)))
        tKsK, tKgK = self._split(loads.k_atom, rank, c.ctas, sK, gK)  # (box, stages), (box, blocks)
        tVsV, tVgV = self._split(loads.v_atom, rank, c.ctas, sV, gV)
        for t in cutlass.range_constexpr(c.tiles):
            gQ = qk.partition_A(cute.local_tile(q_head, (ROWS, c.dim), (None, 0)))
            tQsQ, tQgQ = self._split(loads.q_atom, 0, 1, sQ, gQ)
            cute.arch.mbarrier_wait(bars["q"].empty + t, (fills & 1) ^ 1)
            full = bars["q"].full + t
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self._bytes(ROWS, c.dim))
            q_row = (tile.row * c.ctas + rank) * c.tiles + t
            cute.copy(loads.q_atom, tQgQ[None, q_row], tQsQ[None, t], tma_bar_ptr=full)
            if const_expr(t == 0):
                full = bars["k"].acquire(n, self._bytes(c.tile_n, c.dim))
                block = plan.block(Int32(0))
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, bars["k"].slot(n)], tma_bar_ptr=full, **mask)
        for i in cutlass.range(1, plan.steps + 1, unroll=1):
            if i < plan.steps:
                full = bars["k"].acquire(n + i, self._bytes(c.tile_n, c.dim))
                block = plan.block(i)
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, bars["k"].slot(n + i)], tma_bar_ptr=full, **mask)
            full = bars["v"].acquire(n + i - 1, self._bytes(c.tile_n, c.dim_v))
            block = plan.block(i - 1)
            cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, bars["v"].slot(n + i - 1)], tma_bar_ptr=full, **mask)

    def _operands(self, products: Products, layouts: Layouts, staged):
        """Fragments: of Q, K and V, and for each tile or buffer of S, O and P."""
        c = self.c
        sQ, sK, sV = staged
        qk, pv = products.qk.get_slice(0), products.pv.get_slice(0)
        tQ, tK, tV = qk.make_fragment_A(sQ), qk.make_fragment_B(sK), pv.make_fragment_B(sV)
        shape_s = qk.make_fragment_C(products.qk.partition_shape_C((ROWS, c.tile_n))).layout
        shape_o = pv.make_fragment_C(products.pv.partition_shape_C((ROWS, c.dim_v))).layout
        tS = [cute.make_tensor(tmem.pointer(Float32, column), shape_s) for column in c.scores]
        tO = [cute.make_tensor(tmem.pointer(Float32, column), shape_o) for column in c.outputs]
        # A fragment starts at column 0 whatever its tensor does, and counts in elements of P.
        p = pv.make_fragment_A(cute.make_tensor(tmem.pointer(c.dtype, 0), layouts.p.outer))[None, None, None, 0]
        tP = [cute.make_tensor(p.iterator + column * 32 // c.dtype.width, p.layout) for column in c.scores]
        return (tQ, tK, tV), (tS, tO, tP)

    @cute.jit
    def _multiply_tile(self, products: Products, operands, bars, plan: Blocks, turn: Int32, n: Int32):
        c = self.c
        (tQ, tK, tV), (tS, tO, tP) = operands
        for t in cutlass.range_constexpr(c.tiles):
            cute.arch.mbarrier_wait(bars["q"].full + t, turn & 1)
        bars["k"].wait(n)
        k_block = tK[None, None, None, bars["k"].slot(n)]
        for t in cutlass.range_constexpr(c.tiles):
            self._scores(products.qk, tS, tQ[None, None, None, t], k_block, bars, t, n)
        self._release(bars["k"], bars["k"].slot(n))
        for i in cutlass.range(1, plan.steps + 1, unroll=1):
            more = i < plan.steps
            v_slot = bars["v"].slot(n + i - 1)
            k_slot = bars["k"].slot(n + i)
            if const_expr(c.tiles == 1):
                if more:
                    bars["k"].wait(n + i)
                    k_block = tK[None, None, None, k_slot]
                    self._scores(products.qk, tS, tQ[None, None, None, 0], k_block, bars, 0, n + i)
                    self._release(bars["k"], k_slot)
                else:
                    self._commit(bars["q"].empty)
                bars["v"].wait(n + i - 1)
                self._output(products.pv, tO[0], tP, tV[None, None, None, v_slot], bars, 0, n + i - 1, i > 1)
                self._commit(bars["output"].full)
            else:
                bars["v"].wait(n + i - 1)
                if more:
                    bars["k"].wait(n + i)
                else:
                    for t in cutlass.range_constexpr(c.tiles):
                        self._commit(bars["q"].empty + t)
                v_block, k_block = tV[None, None, None, v_slot], tK[None, None, None, k_slot]
                for t in cutlass.range_constexpr(c.tiles):
                    self._output(products.pv, tO[t], tP, v_block, bars, t, n + i - 1, i > 1)
                    if more:
                        self._scores(products.qk, tS, tQ[None, None, None, t], k_block, bars, t, n + i)
                    else:
                        self._commit(bars["output"].full + t)
                if more:
                    self._release(bars["k"], k_slot)
            self._release(bars["v"], v_slot)

    def _commit(self, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            tcgen05.commit(barrier)

    @cute.jit
    def _scores(self, mma: cute.TiledMma, tS, q_tile, k_block, bars, t: cutlass.Constexpr, n: Int32):
        """Block n's scores of tile t into its buffer."""
        if const_expr(self.c.tiles == 2):
            self._product(mma, tS[t], q_tile, k_block, accumulate=False)
            self._commit(bars["scores"].full + t)
        elif n % 2 == 0:
            self._product(mma, tS[0], q_tile, k_block, accumulate=False)
            self._commit(bars["scores"].full)
        else:
            self._product(mma, tS[1], q_tile, k_block, accumulate=False)
            self._commit(bars["scores"].full + 1)

    @cute.jit
    def _output(self, mma: cute.TiledMma, tO, tP, v_block, bars, t: cutlass.Constexpr, n: Int32, more: cutlass.Boolean):
        """Block n's part of tile t's output, once its probabilities are there and the output is rescaled."""
        slot, phase = self.buffer(t, n)
        cute.arch.mbarrier_wait(bars["scores"].empty + slot, phase)
        tmem.after_sync()
        if const_expr(self.c.tiles == 2):
            self._product(mma, tO, tP[t], v_block, accumulate=more)
        elif n % 2 == 0:
            self._product(mma, tO, tP[0], v_block, accumulate=more)
        else:
            self._product(mma, tO, tP[1], v_block, accumulate=more)
