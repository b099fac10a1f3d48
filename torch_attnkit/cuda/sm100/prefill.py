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

The grid is persistent. Every role walks through the same tiles; the loading warp leaves a note about each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from ..prefill_tiles import Order, Sequence, dense, packed, place, visit_rows
from ..prefill_types import Inputs, Outputs, Scalars
from ..ring import Ring, rings
from . import multi, tmem
from .prefill_rows import Rows
from .prefill_types import ROWS, Config, Layouts, Loads, Products, Tile

# Registers per thread of the softmax, correction, and issuing warpgroups, by the number of tiles: 64 K in all.
_REGISTERS = {1: (256, 144, 112), 2: (192, 80, 48)}
_ONE = tcgen05.CtaGroup.ONE


class Prefill(Rows):
    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream):
        c = self.c
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        tiler_qk, tiler_pv = (ROWS, c.tile_n, c.dim), (ROWS, c.dim_v, c.tile_n)
        qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, _ONE, tiler_qk[:2])
        pv = blackwell.make_trivial_tiled_mma(
            c.dtype, c.dtype, K, MN, Float32, _ONE, tiler_pv[:2], tcgen05.OperandSource.TMEM
        )
        layouts = Layouts(
            blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.tiles),
            blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.stages),
            blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, c.stages),
            blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, 1),
        )
        ins = ins._replace(**{n: self._typed(getattr(ins, n)) for n in "qkv"})
        modes = [0, 2, 1] if c.varlen else [1, 3, 2, 0]
        token_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        dim_first = [modes[1], modes[0], *modes[2:]]
        token_last = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=dim_first))
        load = cpasync.CopyBulkTensorTileG2SOp(_ONE)
        load_kv = cpasync.CopyBulkTensorTileG2SMulticastOp(_ONE) if c.pair else load
        by_row = (1, c.ctas, 1, 1)  # CTAs of a cluster: they differ in M, so they share B
        one = lambda layout: cute.select(layout, mode=[0, 1, 2])
        q_atom, q = cute.nvgpu.make_tiled_tma_atom_A(
            load, self._grouped(token_first(ins.q)), one(layouts.q), tiler_qk, qk
        )
        k_atom, k = cute.nvgpu.make_tiled_tma_atom_B(load_kv, token_first(ins.k), one(layouts.k), tiler_qk, qk, by_row)
        v_atom, v = cute.nvgpu.make_tiled_tma_atom_B(load_kv, token_last(ins.v), one(layouts.v), tiler_pv, pv, by_row)
        order = self._order(ins, outs, scalars)
        loads = Loads(q_atom, q, k_atom, k, v_atom, v)
        self.kernel(loads, ins, outs, scalars, order, layouts, Products(qk, pv)).launch(
            grid=[c.ctas * cutlass.min(scalars.sms // c.ctas, order.size()), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

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
        memory = cutlass.memory.SmemAllocator()
        bars = self._barriers(memory, warp)
        staged = [
            memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner) for layout in layouts[:3]
        ]  # ((128, 16), 1, D / 16, tiles), ((N, 16), 1, D / 16, stages), ((Dv, 16), 1, N / 16, stages)
        notes = memory.allocate_tensor(Int32, cute.make_layout((len(Tile._fields), 2)), 16)
        # What the output so far is to be multiplied by, of several blocks, and a tile's last state, of two tiles.
        factors = memory.allocate_tensor(Float32, cute.make_layout((ROWS, c.turns * c.tiles)), 16)
        finals = memory.allocate_tensor(Float32, cute.make_layout((ROWS, 3, 2 * c.tiles)), 16)
        base = memory.allocate(4, 4)
        if warp == c.product_warp:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
        if warp == c.load_warp:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        self._meet()
        tmem.after_sync()
        soft, correct, issue = _REGISTERS[c.tiles]
        if warp < c.correction_warp:
            cute.arch.setmaxregister_increase(soft)
            self.softmax(ins, scalars, bars, notes, (factors, finals), warp)
        elif warp < c.product_warp:
            self._registers(correct)
            self.correct(ins, outs, scalars, bars, notes, (factors, finals), staged[2], warp)
        else:
            cute.arch.setmaxregister_decrease(issue)
            if warp == c.load_warp:
                self.load(loads, ins, outs, scalars, order, products, bars, notes, staged)
            if warp == c.product_warp:
                self.multiply(scalars, products, layouts, bars, notes, staged)
        self._meet()  # neither CTA may leave while the other still writes to its memory
        if warp == c.product_warp:
            tmem.after_sync()
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    def _meet(self) -> None:
        """All threads of the CTA, or of the pair."""
        if const_expr(self.c.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _typed(self, t: cute.Tensor) -> cute.Tensor:
        """E4M3, which comes as bytes."""
        return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.c.dtype), t.layout) if self.c.codes else t

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

    def _registers(self, count: int) -> None:
        """Up or down from what the launch gave, 64 K among all threads."""
        if const_expr(count > 65536 // self.c.threads):
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

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

    def _order(self, ins: Inputs, outs: Outputs, scalars: Scalars) -> Order:
        c = self.c
        heads = Int32(ins.q.shape[1 if c.varlen else 2]) // c.group
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // (c.rows * c.ctas) + Int32(ins.low.shape[0])
            return Order(slots, heads, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.rows * c.ctas - 1)) // (c.rows * c.ctas)
        return Order(rows, heads, Int32(outs.out.shape[0] if c.split else ins.q.shape[0]), scalars.section)

    def _visit(self, tile: Tile, scalars: Scalars):
        """The blocks that the queries of a turn need, together; or this share of them."""
        c = self.c
        seq = Sequence(tile.q0, tile.tokens, tile.shift, tile.start, tile.end)
        blocks = visit_rows(c, seq, tile.row * (c.rows * c.ctas), c.rows * c.ctas, scalars)
        return multi.of_share(blocks, tile.part, tile.parts) if c.split else blocks

    @property
    def uneven(self) -> bool:
        """Whether a tile's work grows with its place in the sequence."""
        return self.c.causal and not self.c.window

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
        """One warp: of every turn the note, the queries and all blocks of K and V."""
        c = self.c
        sQ, sK, sV = staged
        rank = cute.arch.block_idx()[0] % c.ctas
        cta, ctas = cute.arch.block_idx()[0] // c.ctas, cute.arch.grid_dim()[0] // c.ctas
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        turn, fills, n = Int32(0), Int32(0), Int32(0)
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis]) // c.group
        at = place(Int32(0), cta, ctas)
        qk, pv = products.qk.get_slice(0), products.pv.get_slice(0)
        split = lambda atom, part, parts, s, g: cpasync.tma_partition(
            atom, part, cute.make_layout(parts), cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        )
        bytes_of = lambda rows, dim: rows * dim * c.dtype.width // 8
        while at < order.size():
            tile, k0 = self._turn(ins, order, at)
            if self._wanted(ins, outs, scalars, tile):
                self._leave(bars["notes"], notes, fills, tile)
                plan = self._visit(tile, scalars)
                k_head, v_head = (self._head(x, tile.head // group, tile.batch) for x in (loads.k, loads.v))
                if const_expr(c.varlen):
                    k_head, v_head = cute.domain_offset((k0, 0), k_head), cute.domain_offset((0, k0), v_head)
                gK = qk.partition_B(cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0)))
                gV = pv.partition_B(cute.local_tile(v_head, (c.dim_v, c.tile_n), (0, None)))
                tKsK, tKgK = split(loads.k_atom, rank, c.ctas, sK, gK)  # (box, stages), (box, blocks)
                tVsV, tVgV = split(loads.v_atom, rank, c.ctas, sV, gV)
                for t in cutlass.range_constexpr(c.tiles):
                    q_head = self._head(loads.q, tile.head, tile.batch)
                    if const_expr(c.varlen):
                        q_head = cute.domain_offset((tile.q0 if c.group == 1 else (0, tile.q0), 0), q_head)
                    gQ = qk.partition_A(cute.local_tile(q_head, (ROWS, c.dim), (None, 0)))
                    tQsQ, tQgQ = split(loads.q_atom, 0, 1, sQ, gQ)
                    cute.arch.mbarrier_wait(bars["q"].empty + t, (fills & 1) ^ 1)
                    full = bars["q"].full + t
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, bytes_of(ROWS, c.dim))
                    q_row = (tile.row * c.ctas + rank) * c.tiles + t
                    cute.copy(loads.q_atom, tQgQ[None, q_row], tQsQ[None, t], tma_bar_ptr=full)
                    if const_expr(t == 0):
                        full = bars["k"].acquire(n, bytes_of(c.tile_n, c.dim))
                        block = plan.block(Int32(0))
                        cute.copy(
                            loads.k_atom, tKgK[None, block], tKsK[None, bars["k"].slot(n)], tma_bar_ptr=full, **mask
                        )
                for i in cutlass.range(1, plan.steps + 1, unroll=1):
                    if i < plan.steps:
                        full = bars["k"].acquire(n + i, bytes_of(c.tile_n, c.dim))
                        block = plan.block(i)
                        cute.copy(
                            loads.k_atom, tKgK[None, block], tKsK[None, bars["k"].slot(n + i)], tma_bar_ptr=full, **mask
                        )
                    full = bars["v"].acquire(n + i - 1, bytes_of(c.tile_n, c.dim_v))
                    block = plan.block(i - 1)
                    cute.copy(
                        loads.v_atom, tVgV[None, block], tVsV[None, bars["v"].slot(n + i - 1)], tma_bar_ptr=full, **mask
                    )
                n += plan.steps
                fills += 1
            turn += 1
            at = place(turn, cta, ctas)
        none = Int32(0)
        self._leave(bars["notes"], notes, fills, Tile(Int32(-1), *[none] * (len(Tile._fields) - 1)))

    @cute.jit
    def _wanted(self, ins: Inputs, outs: Outputs, scalars: Scalars, tile: Tile) -> Boolean:
        """Whether the tiles of a turn have queries and, of a share of the keys, blocks."""
        c = self.c
        wanted = (tile.row >= 0) & (tile.row * (c.rows * c.ctas) < tile.tokens)
        if const_expr(c.split):
            wanted = multi.has_keys(c, outs, tile, self._visit(tile, scalars), Int32(ins.q.shape[0]))
        return wanted

    @cute.jit
    def _turn(self, ins: Inputs, order: Order, at: Int32):
        """The tile at a place of the order, row -1 if there is none, and its sequence's first key."""
        c = self.c
        if const_expr(c.varlen):
            slot, head = at // order.heads, at % order.heads
            if const_expr(c.causal):
                slot = order.rows - 1 - slot
            sizes = (Int32(ins.q.shape[0]), Int32(ins.k.shape[0]))
            row, number, k0, seq = packed((ins.low, ins.high), *sizes, slot, c.rows * c.ctas)
            return Tile(row, head, number, *seq, Int32(0), Int32(1)), k0
        row, head, batch = order.tile(at, self.uneven)
        part, parts = Int32(0), Int32(1)
        if const_expr(c.split):
            sequences = Int32(ins.q.shape[0])
            part, batch, parts = batch // sequences, batch % sequences, order.batches // sequences
        return Tile(row, head, batch, *dense(c, ins, batch), part, parts), Int32(0)

    def _head(self, t: cute.Tensor, head: Int32, batch: Int32) -> cute.Tensor:
        return t[None, None, head] if self.c.varlen else t[None, None, head, batch]

    def _leave(self, ring: Ring, notes: cute.Tensor, n: Int32, tile: Tile) -> None:
        full = ring.await_empty(n)
        with cute.arch.elect_one():
            for i, value in enumerate(tile):
                notes[i, ring.slot(n)] = value
            cute.arch.mbarrier_arrive(full)

    def _read(self, ring: Ring, notes: cute.Tensor, n: Int32) -> Tile:
        """The note of turn n, for every warp but the one that leaves it."""
        ring.wait(n)
        tile = Tile(*(cute.arch.make_warp_uniform(notes[i, ring.slot(n)]) for i in range(len(Tile._fields))))
        cute.arch.sync_warp()
        ring.release(n)
        return tile

    @cute.jit
    def multiply(self, scalars: Scalars, products: Products, layouts: Layouts, bars, notes, staged):
        """One warp: issues the products of all tiles, in the order that the top of this file shows."""
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
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
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
            n += plan.steps
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    def _release(self, ring: Ring, slot: Int32) -> None:
        """Once the products so far are done; in both CTAs of a pair, for either fills half of a stage in both."""
        with cute.arch.elect_one():
            tcgen05.commit(ring.empty + slot, cutlass.Int16(3) if self.c.pair else None)

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

    def _product(self, mma: cute.TiledMma, acc, a, b, *, accumulate) -> None:
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(tcgen05.Field.ACCUMULATE, True)
