"""Softmax attention with heads of 512 on Blackwell: a pair of CTAs computes a tile of 128 rows.

An output of 128 x 512 numbers would fill tensor memory and leave no room for scores. So two CTAs share a tile, 64 rows
each, by products of a pair (``cta_group::2``, M 128), which use all 128 lanes of either CTA: rows in lanes 0-63 for a
product's first columns and in lanes 64-127 for its last ones (PTX ISA, "Data Path Layout Organization", layout B). The
output takes half of tensor memory, two buffers of scores a quarter. Each CTA loads half of every block for both: of K
half the keys, of V half the columns. Probabilities pass through shared memory: in tensor memory each half of the lanes
would need the other's too.

    loads, a warp in both CTAs: Q, pieces of K, pieces of V          products, one warp: S = Q K', then O (+)= P V
    softmax, a warpgroup in both: S -> P in shared memory            correction, a warpgroup in both: O *= factor -> out

Products are issued as S(0) | S(1) O(0) | S(2) O(1) | ...; S is the sum over four pieces of the head dim, O two products
of 256 columns. Roles and notes are those of ``prefill.py``, and so is the persistent grid of pairs.

A pair does 128 operations for each byte that it reads, half of what ``prefill.py`` does with its tiles of 256 rows. So
two pairs may form a cluster on neighbouring tiles (``c.pair``), where each CTA loads half of its half for both pairs by
TMA multicast. For 1152 tokens and 2 heads the simulator then counts 26 MB of copies instead of 45.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from ..prefill_tiles import Order, place
from ..prefill_types import Inputs, Outputs, Scalars
from ..ring import Ring, rings
from . import tmem
from .prefill import Prefill
from .prefill_types import ROWS, Layouts, Loads, Products, Tile
from .prefill_wide_rows import WideRows
from .prefill_wide_types import CTAS, HALF, LANES, PIECE

# Registers per thread of the softmax, correction, and issuing warpgroups: 64 K in all.
_REGISTERS = (256, 144, 112)
_ONE, _TWO = tcgen05.CtaGroup.ONE, tcgen05.CtaGroup.TWO


class WidePrefill(WideRows, Prefill):
    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream):
        c = self.c
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        tiler_qk, tiler_pv = (ROWS, c.tile_n, PIECE), (ROWS, HALF, c.tile_n // 2)
        qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, _TWO, tiler_qk[:2])
        pv = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, MN, Float32, _TWO, tiler_pv[:2])
        layouts = Layouts(
            blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.k_pieces),
            blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.stages),
            blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, c.stages),
            blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, 2),
        )
        modes = [0, 2, 1] if c.varlen else [1, 3, 2, 0]
        token_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        token_last = lambda t: cute.make_tensor(
            t.iterator, cute.select(t.layout, mode=[modes[1], modes[0], *modes[2:]])
        )
        one = lambda layout: cute.select(layout, mode=[0, 1, 2])
        # Loads of a pair complete on the first CTA's barrier. V's complete on each CTA's own.
        load = cpasync.CopyBulkTensorTileG2SOp
        load_kv = cpasync.CopyBulkTensorTileG2SMulticastOp if c.pair else load
        by_row = (CTAS, c.ctas, 1, 1)  # pairs of a cluster: they differ in M, so they share B
        atom_a, atom_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        q_atom, q = atom_a(load(_TWO), self._grouped(token_first(ins.q)), one(layouts.q), tiler_qk, qk)
        k_atom, k = atom_b(load_kv(_TWO), token_first(ins.k), one(layouts.k), tiler_qk, qk, by_row)
        v_atom, v = atom_b(load_kv(_ONE), token_last(ins.v), one(layouts.v), tiler_pv, pv, by_row)
        order, loads = self._order(ins, outs, scalars), Loads(q_atom, q, k_atom, k, v_atom, v)
        self.kernel(loads, ins, outs, scalars, order, layouts, Products(qk, pv)).launch(
            grid=[c.cluster * self._clusters(order, scalars), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _clusters(self, order: Order, scalars: Scalars) -> Int32:
        """Pairs are persistent. How many clusters of four a chip holds at a time is not known: each has one turn."""
        return order.size() if self.c.pair else cutlass.min(scalars.sms // CTAS, order.size())

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        order: Order,
        layouts: Layouts,
        products: Products,
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.block_idx()[0] % CTAS
        memory = cutlass.memory.SmemAllocator()
        bars = self._barriers(memory, warp)
        # ((64, 16), 1, 8, 4), ((64, 16), 1, 8, stages), ((128, 16), 1, 4, stages), ((64, 16), 1, 4, 2)
        sQ, sK, sV, sP = (
            memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner) for layout in layouts
        )
        notes = memory.allocate_tensor(Int32, cute.make_layout((len(Tile._fields), 2)), 16)
        # What the output so far is to be multiplied by, the threads' maxima, and their last states, each of two blocks
        # or tiles.
        factors = memory.allocate_tensor(Float32, cute.make_layout((ROWS, c.turns)), 16)
        peaks = memory.allocate_tensor(Float32, cute.make_layout((ROWS, 2)), 16)
        finals = memory.allocate_tensor(Float32, cute.make_layout((ROWS, 3, 2)), 16)
        base = memory.allocate(4, 4)
        if warp == c.product_warp:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32), is_two_cta=True)
        if warp == c.load_warp:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        self._meet()
        tmem.after_sync()
        if warp < c.correction_warp:
            cute.arch.setmaxregister_increase(_REGISTERS[0])
            self.softmax(ins, scalars, bars, notes, ((factors, peaks, sP), finals), warp)
        elif warp < c.product_warp:
            self._registers(_REGISTERS[1])
            self.correct(ins, outs, scalars, bars, notes, (factors, finals), sV, warp)
        else:
            cute.arch.setmaxregister_decrease(_REGISTERS[2])
            if warp == c.load_warp:
                self.load(loads, ins, outs, scalars, order, products, bars, notes, (sQ, sK, sV))
            if (warp == c.product_warp) & (rank == 0):
                self.multiply(scalars, products, layouts, bars, notes, (sQ, sK, sV, sP))
        self._meet()  # no CTA may leave while the others' products and copies still use its memory
        if warp == c.product_warp:
            tmem.after_sync()
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS, is_two_cta=True)

    def _meet(self) -> None:
        """All threads of the cluster."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _barriers(self, memory, warp: Int32):
        """Rings of notes and of pieces of K and V, and pairs of single mbarriers: see the fields' names."""
        c = self.c
        first = 1 - cute.arch.block_idx()[0] % CTAS  # 1 in the first CTA, whose product warp reads notes as well
        table = (
            ("notes", 2, 1, 8 + first),
            ("k", c.stages, 1, c.ctas),  # full: of the first CTA alone, for both
            ("v", c.stages, 1, c.ctas),
            ("q", 1, 1, 1),  # full: of the first CTA alone, for both
            ("scores", 2, 1, 16),  # full: S is whole; empty, of the first CTA alone: P is, V is there, O is rescaled
            ("factors", c.turns, 4, 1),  # full: the softmax group has left its factors or finals; empty unused
            ("output", 1, 1, 1),  # full: a block's products are done; empty unused
        )
        return rings(memory, warp, table)

    @cute.jit
    def _expect(self, full: cute.Pointer, nbytes: cutlass.Constexpr, rank: Int32) -> None:
        """Announce bytes that each CTA loads, on the first one's barrier."""
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, CTAS * nbytes)

    @cute.jit
    def load(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        order: Order,
        products: Products,
        bars,
        notes,
        staged,
    ):
        """One warp of each CTA: of every turn the note, and its half of the queries and of all pieces of K and V."""
        c = self.c
        sQ, sK, sV = staged
        rank = cute.arch.block_idx()[0] % CTAS
        pair = cute.arch.block_idx()[0] // CTAS % c.ctas
        cluster, clusters = cute.arch.block_idx()[0] // c.cluster, cute.arch.grid_dim()[0] // c.cluster
        mask = {"mcast_mask": cutlass.Int16(5 << rank)} if c.pair else {}  # the CTAs of this rank in both pairs
        turn, fills, n = Int32(0), Int32(0), Int32(0)
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis]) // c.group
        qk, pv = products.qk.get_slice(rank), products.pv.get_slice(rank)
        split = lambda atom, part, parts, s, g: cpasync.tma_partition(
            atom, part, cute.make_layout(parts), cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        )
        at = place(Int32(0), cluster, clusters)
        while at < order.size():
            tile, k0 = self._turn(ins, order, at)
            if self._wanted(ins, outs, scalars, tile):
                self._leave(bars["notes"], notes, fills, tile)
                plan = self._visit(tile, scalars)
                q_head = self._head(loads.q, tile.head, tile.batch)
                k_head, v_head = (self._head(x, tile.head // group, tile.batch) for x in (loads.k, loads.v))
                if const_expr(c.varlen):
                    q_head = cute.domain_offset((tile.q0 if c.group == 1 else (0, tile.q0), 0), q_head)
                    k_head, v_head = cute.domain_offset((k0, 0), k_head), cute.domain_offset((0, k0), v_head)
                gQ = qk.partition_A(cute.local_tile(q_head, (ROWS, PIECE), (tile.row * c.ctas + pair, None)))
                gK = qk.partition_B(cute.local_tile(k_head, (c.tile_n, PIECE), (None, None)))
                gV = pv.partition_B(cute.local_tile(v_head, (HALF, c.tile_n // 2), (None, None)))
                tQsQ, tQgQ = split(loads.q_atom, 0, 1, sQ, gQ)  # (box, pieces) both
                tKsK, tKgK = split(loads.k_atom, pair, c.ctas, sK, gK)  # (box, stages), (box, blocks, pieces)
                tVsV, tVgV = split(
                    loads.v_atom, pair, c.ctas, sV, gV
                )  # (box, stages), (box, halves of Dv, half blocks)
                full = bars["q"].await_empty(fills)
                self._expect(full, self._bytes(LANES, c.dim), rank)
                for part in cutlass.range_constexpr(c.k_pieces):
                    cute.copy(loads.q_atom, tQgQ[None, part], tQsQ[None, part], tma_bar_ptr=full)
                for i in cutlass.range(0, plan.steps + 1, unroll=1):
                    if i < plan.steps:
                        for part in cutlass.range(0, c.k_pieces, unroll=1):
                            k = (n + i) * c.k_pieces + part
                            full = bars["k"].await_empty(k)
                            self._expect(full, self._bytes(c.tile_n // CTAS, PIECE), rank)
                            source = tKgK[None, plan.block(i), part]
                            cute.copy(loads.k_atom, source, tKsK[None, bars["k"].slot(k)], tma_bar_ptr=full, **mask)
                    if i > 0:
                        for part in cutlass.range(0, c.v_pieces, unroll=1):
                            k = (n + i - 1) * c.v_pieces + part
                            full = bars["v"].acquire(k, self._bytes(c.tile_n // 2, HALF // CTAS))
                            source = tVgV[None, part // 2, plan.block(i - 1) * 2 + part % 2]
                            cute.copy(loads.v_atom, source, tVsV[None, bars["v"].slot(k)], tma_bar_ptr=full, **mask)
                n += plan.steps
                fills += 1
            turn += 1
            at = place(turn, cluster, clusters)
        none = Int32(0)
        self._leave(bars["notes"], notes, fills, Tile(Int32(-1), *[none] * (len(Tile._fields) - 1)))

    def _bytes(self, rows: int, elements: int) -> int:
        return rows * elements * self.c.dtype.width // 8

    @cute.jit
    def multiply(self, scalars: Scalars, products: Products, layouts: Layouts, bars, notes, staged):
        """One warp of the first CTA: issues the products of all tiles, in the order that the top of this file shows."""
        c = self.c
        sQ, sK, sV, sP = staged
        qk, pv = products.qk.get_slice(0), products.pv.get_slice(0)
        queries = (products.qk, qk.make_fragment_A(sQ), qk.make_fragment_B(sK))
        values = (products.pv, pv.make_fragment_A(sP), pv.make_fragment_B(sV))
        shapes = (
            qk.make_fragment_C(products.qk.partition_shape_C((ROWS, c.tile_n))).layout,
            pv.make_fragment_C(products.pv.partition_shape_C((ROWS, HALF))).layout,
        )
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
            bars["q"].wait(turn)
            self._scores(queries, shapes[0], bars, n)
            for i in cutlass.range(1, plan.steps + 1, unroll=1):
                if i < plan.steps:
                    self._scores(queries, shapes[0], bars, n + i)
                else:
                    self._commit(bars["q"].empty)
                self._output(values, shapes[1], bars, n + i - 1, i > 1)
            n += plan.steps
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    def _commit(self, barrier: cute.Pointer) -> None:
        """Arrive in both CTAs of this pair, once the products so far are done."""
        pair = cute.arch.block_idx()[0] // CTAS % self.c.ctas
        with cute.arch.elect_one():
            tcgen05.commit(barrier, cutlass.Int16(3 << CTAS * pair), _TWO)

    def _release(self, ring: Ring, slot: Int32) -> None:
        """The same in all CTAs of the cluster, which have parts of the slot's next piece to load."""
        with cute.arch.elect_one():
            tcgen05.commit(ring.empty + slot, cutlass.Int16((1 << self.c.cluster) - 1), _TWO)

    @cute.jit
    def _scores(self, queries, shape, bars, n: Int32):
        """Block n's scores into their buffer, piece by piece of the head dim."""
        c = self.c
        mma, tQ, tK = queries
        slot, _ = self.buffer(0, n)
        tS = cute.make_tensor(tmem.pointer(Float32, slot * (c.tile_n // 2) + c.scores[0]), shape)
        for part in cutlass.range(0, c.k_pieces, unroll=1):
            k = n * c.k_pieces + part
            bars["k"].wait(k)
            at = bars["k"].slot(k)
            self._product(mma, tS, tQ[None, None, None, part], tK[None, None, None, at], accumulate=part > 0)
            self._release(bars["k"], at)
        self._commit(bars["scores"].full + slot)

    @cute.jit
    def _output(self, values, shape, bars, n: Int32, more: cutlass.Boolean):
        """Block n's part of the output, once probabilities and V are there and the output is rescaled in both CTAs."""
        c = self.c
        mma, tP, tV = values
        slot, phase = self.buffer(0, n)
        cute.arch.mbarrier_wait(bars["scores"].empty + slot, phase)
        tmem.after_sync()
        for h in cutlass.range_constexpr(c.halves):
            tO = cute.make_tensor(tmem.pointer(Float32, c.outputs[0] + h * HALF // 2), shape)
            for keys in cutlass.range_constexpr(2):
                at = bars["v"].slot(n * c.v_pieces + 2 * h + keys)
                accumulate = more if keys == 0 else True
                self._product(mma, tO, tP[None, None, None, keys], tV[None, None, None, at], accumulate=accumulate)
                self._release(bars["v"], at)
        self._commit(bars["output"].full)
