"""What the Blackwell prefill kernels have in common: the launch, how a CTA begins and ends, the walk of its roles.

The grid is persistent. Every role walks through the same tiles; the loading warp leaves a note about each. A kernel
fills in the barriers, what its softmax shares, and for one tile the copies and the products. Imports cutlass.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from ..prefill_tiles import Blocks, Order, Outside, Sequence, dense, outside, packed, place, visit_rows
from ..prefill_types import Inputs, Outputs, Scalars
from ..ring import Ring
from . import multi, tmem
from .prefill_types import ROWS, Config, Layouts, Loads, Products, Tile

# Registers per thread of the softmax (with two tiles, two), correction, and issuing warpgroups, by the number of tiles.
# More than a launch has, 168 for each of 384 threads or 128 for each of 512, would be waited for without end.
_REGISTERS = {1: (248, 144, 112), 2: (208, 56, 40)}
_ONE, _TWO = tcgen05.CtaGroup.ONE, tcgen05.CtaGroup.TWO


class Frame:
    """The base of ``Prefill`` and ``WidePrefill``, beside ``Rows``, which has the roles with rows."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream):
        c = self.c
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        tiler_qk, tiler_pv = c.tilers
        qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, c.cta_group, tiler_qk[:2])
        pv = blackwell.make_trivial_tiled_mma(
            c.dtype, c.dtype, K, MN, Float32, c.cta_group, tiler_pv[:2], c.weights_from
        )
        layouts = Layouts(
            blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.depths.q),
            blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.depths.k),
            blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, c.depths.v),
            blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, c.depths.p),
        )
        products = Products(qk, pv)
        ins = ins._replace(**{n: self._typed(getattr(ins, n)) for n in "qkv"})
        order, loads = self._order(ins, outs, scalars), self._loads(ins, layouts, products)
        self.kernel(loads, ins, outs, scalars, order, layouts, products).launch(
            grid=[c.cluster * self._clusters(order, scalars), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _loads(self, ins: Inputs, layouts: Layouts, products: Products) -> Loads:
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
        q_atom, q = atom_a(load(c.cta_group), q_rows, one(layouts.q), tiler_qk, products.qk)
        k_atom, k = atom_b(load_kv(c.cta_group), token_first(ins.k), one(layouts.k), tiler_qk, products.qk, by_row)
        v_atom, v = atom_b(load_kv(_ONE), token_last(ins.v), one(layouts.v), tiler_pv, products.pv, by_row)
        return Loads(q_atom, q, k_atom, k, v_atom, v)

    def _clusters(self, order: Order, scalars: Scalars) -> Int32:
        return cutlass.min(scalars.sms // self.c.cluster, order.size())

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
            memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner) for layout in layouts[: c.staged]
        ]
        notes = memory.allocate_tensor(Int32, cute.make_layout((len(Tile._fields), 2)), 16)
        # What the output so far is to be multiplied by, of several blocks, and a tile's last state, of two tiles.
        factors = memory.allocate_tensor(Float32, cute.make_layout((ROWS, c.turns * c.tiles)), 16)
        beside = self._beside(memory, factors, staged)
        finals = memory.allocate_tensor(Float32, cute.make_layout((ROWS, 3, 2 * c.tiles)), 16)
        base, two = memory.allocate(4, 4), c.cta_group is _TWO
        if warp == c.product_warp:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32), is_two_cta=two)
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
            self.softmax(ins, scalars, bars, notes, (beside, finals), warp)
        elif warp < c.product_warp:
            self._registers(correct)
            self.correct(ins, outs, scalars, bars, notes, (factors, finals), staged[2], warp)
        else:
            cute.arch.setmaxregister_decrease(issue)
            if warp == c.load_warp:
                self.load(loads, ins, outs, scalars, order, products, bars, notes, staged)
            if self._issues(warp):
                self.multiply(scalars, products, layouts, bars, notes, staged)
        self._meet()  # no CTA may leave while the others' products and copies still use its memory
        if warp == c.product_warp:
            tmem.after_sync()
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS, is_two_cta=two)

    def _beside(self, memory: Any, factors: cute.Tensor, staged: list) -> Any:
        """What the softmax writes to shared memory block by block."""
        return factors

    def _issues(self, warp: Int32) -> Boolean:
        """Whether this warp issues products."""
        return warp == self.c.product_warp

    def _meet(self) -> None:
        """All threads of the CTA, or of the cluster."""
        if const_expr(self.c.cluster > 1):
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

    def _order(self, ins: Inputs, outs: Outputs, scalars: Scalars) -> Order:
        c = self.c
        heads = Int32(ins.q.shape[1 if c.varlen else 2]) // c.group
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // (c.rows * c.ctas) + Int32(ins.low.shape[0])
            return Order(slots, heads, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.rows * c.ctas - 1)) // (c.rows * c.ctas)
        return Order(rows, heads, Int32(outs.out.shape[0] if c.split else ins.q.shape[0]), scalars.section)

    def _visit(self, tile: Tile, scalars: Scalars) -> Blocks:
        """The blocks that the queries of a turn need, together; or this share of them."""
        c = self.c
        blocks = visit_rows(c, self._sequence(tile), tile.row * (c.rows * c.ctas), c.rows * c.ctas, scalars)
        return multi.of_share(blocks, tile.part, tile.parts) if c.split else blocks

    def _sequence(self, tile: Tile) -> Sequence:
        return Sequence(tile.q0, tile.tokens, tile.shift, tile.start, tile.end)

    def _outside(self, tile: Tile, scalars: Scalars) -> Outside:
        return outside(self.c, self._sequence(tile), scalars)

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
        cluster, clusters = cute.arch.block_idx()[0] // c.cluster, cute.arch.grid_dim()[0] // c.cluster
        mask = self._multicast()
        turn, fills, n = Int32(0), Int32(0), Int32(0)
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis]) // c.group
        at = place(Int32(0), cluster, clusters)
        while at < order.size():
            tile, k0 = self._turn(ins, order, at)
            if self._wanted(ins, outs, scalars, tile):
                self._leave(bars["notes"], notes, fills, tile)
                plan = self._visit(tile, scalars)
                heads = self._heads(loads, group, tile, k0)
                self._load_tile(loads, heads, products, bars, staged, mask, (tile, plan, fills, n))
                n += plan.steps
                fills += 1
            turn += 1
            at = place(turn, cluster, clusters)
        none = Int32(0)
        self._leave(bars["notes"], notes, fills, Tile(Int32(-1), *[none] * (len(Tile._fields) - 1)))

    def _heads(self, loads: Loads, group: Int32, tile: Tile, k0: Int32) -> list:
        """A tile's head of Q, K and V, from its sequence's first token on: (T, D), (S, D), (Dv, S)."""
        c = self.c
        kv_head = tile.head // group
        heads = zip((loads.q, loads.k, loads.v), (tile.head, kv_head, kv_head), strict=True)
        if const_expr(not c.varlen):
            return [t[None, None, head, tile.batch] for t, head in heads]
        first = ((tile.q0 if c.group == 1 else (0, tile.q0), 0), (k0, 0), (0, k0))
        return [cute.domain_offset(at, t[None, None, head]) for at, (t, head) in zip(first, heads, strict=True)]

    def _split(self, atom: cute.CopyAtom, part: Any, parts: int, s: cute.Tensor, g: cute.Tensor) -> tuple:
        """One of the ``parts`` that CTAs load of every box, as a copy's target and source: (box, ...) both."""
        s, g = cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        return cpasync.tma_partition(atom, part, cute.make_layout(parts), s, g)

    def _bytes(self, rows: int, elements: int) -> int:
        return rows * elements * self.c.dtype.width // 8

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
        """One warp: issues the products of all tiles, in the order that the kernel's file shows at its top."""
        operands = self._operands(products, layouts, staged)
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
            self._multiply_tile(products, operands, bars, plan, turn, n)
            n += plan.steps
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    def _release(self, ring: Ring, slot: Int32) -> None:
        """Once the products so far are done; in all CTAs of a cluster, which have parts of the slot's next fill."""
        c = self.c
        with cute.arch.elect_one():
            mask = cutlass.Int16((1 << c.cluster) - 1) if c.cluster > 1 else None
            tcgen05.commit(ring.empty + slot, mask, c.cta_group)

    def _product(self, mma: cute.TiledMma, acc, a, b, *, accumulate) -> None:
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(tcgen05.Field.ACCUMULATE, True)
