"""Softmax attention of many queries per sequence on Hopper: TMA loads, ``wgmma`` products, specialised warps.

    producer warp  --Q, K and V, a ring each-->  shared memory  -->  2 or 3 consumer warpgroups, 64 rows each

A consumer keeps scores, probabilities and output in registers. It issues ``S' = Q K'`` of the next block and then
``O += P V`` of this one, and computes the next softmax while the second product runs. Consumers take turns at issuing
products (``Turn``), so one's softmax runs under another's products. The grid is persistent: the producer has the next
tile's K, Q and V on the way while the consumers store the last one. Blocks of keys that no query of a tile sees are
never loaded; only blocks at an edge of what is seen are masked. Two CTAs may form a ``pair`` over two heads that share
their keys: each loads half of every block by TMA multicast.

Tile letters: M queries, N keys. Shared memory: Q (M, D, q_stages), K (N, D, stages), V (N, Dv, stages), a note beside
each Q, and two mbarriers for every stage.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..prefill_tiles import Order, Sequence, dense, packed, place, visit_rows
from ..prefill_types import Inputs, Outputs, Scalars
from ..ring import Ring
from ..warp_ops import exp2
from . import prefill_softmax as softmax
from .prefill_products import WARPGROUP, Barrier, Products, split
from .prefill_types import Config, Layouts, Loads, Place

# Registers per thread of the producer's and the consumers' warpgroups, by the number of consumers: 64 K in all.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}


class Prefill(Products):
    def __init__(self, config: Config):
        super().__init__(config)
        self.regs_load, self.regs_mma = _REGISTERS[config.consumers]

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream):
        c = self.c
        bytes_of = lambda rows, dim: rows * dim * c.dtype.width // 8
        self.bytes_q, self.bytes_k, self.bytes_v = (
            bytes_of(c.tile_m, c.dim),
            bytes_of(c.tile_n, c.dim),
            bytes_of(c.tile_n, c.dim_v),
        )
        layouts = Layouts(
            self._staged((c.tile_m, c.dim, c.q_stages)),
            self._staged((c.tile_n, c.dim, c.stages)),
            self._staged((c.tile_n, c.dim_v, c.stages)),
        )
        modes = [0, 2, 1] if c.varlen else [1, 3, 2, 0]
        token_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        load = cpasync.CopyBulkTensorTileG2SOp()
        atoms = []
        load_kv = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else load
        for op, tensor, layout in ((load, ins.q, layouts.q), (load_kv, ins.k, layouts.k), (load_kv, ins.v, layouts.v)):
            tile = cute.select(layout, mode=[0, 1])
            shape = (cute.size(tile, mode=[0]), cute.size(tile, mode=[1]))
            both = 2 if c.pair and op is load_kv else 1
            atoms += cpasync.make_tiled_tma_atom(op, token_first(tensor), tile, shape, both)
        qk_mma, pv_mma = self._mmas()
        order = self._order(ins, scalars)
        self.kernel(Loads(*atoms), ins, outs, scalars, order, layouts, qk_mma, pv_mma).launch(
            grid=[self._ctas * cutlass.min(scalars.sms // self._ctas, order.size()), 1, 1],
            block=[WARPGROUP * (1 + c.consumers), 1, 1],
            cluster=[self._ctas, 1, 1],
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
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        rings = self._rings(memory, warp)
        staged = [
            memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner) for layout in layouts
        ]  # (M, D, q_stages), (N, D, stages), (N, Dv, stages)
        # (8, q_stages): the note with each Q: tile (-1: no more), head, batch, and the five numbers of its Sequence.
        staged.append(memory.allocate_tensor(Int32, cute.make_layout((8, c.q_stages)), 16))
        if warp == 0:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        self._meet()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp == 0:
                self.produce(loads, ins, scalars, order, rings, staged)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.consume(ins, outs, scalars, order, rings, staged, qk_mma, pv_mma)
        if const_expr(c.pair):
            self._meet()  # neither CTA may leave while the other still writes to its memory

    def _meet(self) -> None:
        if const_expr(self.c.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @property
    def _ctas(self) -> int:
        return 2 if self.c.pair else 1

    @cute.jit
    def _rings(self, memory, warp: Int32):
        c = self.c
        rings = []
        for stages, pair in ((c.q_stages, False), (c.stages, c.pair), (c.stages, c.pair)):
            full = memory.allocate_array(cutlass.Int64, stages)
            empty = memory.allocate_array(cutlass.Int64, stages)
            rings.append(Ring(full, empty, stages, pair))
        if warp == 0:
            with cute.arch.elect_one():
                for ring in rings:
                    for i in cutlass.range_constexpr(ring.stages):
                        cute.arch.mbarrier_init(ring.full + i, 1)
                        cute.arch.mbarrier_init(ring.empty + i, 4 * c.consumers * (2 if ring.pair else 1))
        return rings

    def _order(self, ins: Inputs, scalars: Scalars) -> Order:
        c = self.c
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // c.tile_m + Int32(ins.low.shape[0])
            return Order(slots, Int32(ins.q.shape[1]) // self._ctas, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.tile_m - 1)) // c.tile_m
        return Order(rows, Int32(ins.q.shape[2]) // self._ctas, Int32(ins.q.shape[0]), scalars.section)

    @property
    def uneven(self) -> bool:
        """Whether a tile's work grows with its place in the sequence."""
        return self.c.causal and not self.c.window

    @cute.jit
    def produce(self, loads: Loads, ins: Inputs, scalars: Scalars, order: Order, rings, staged):
        """One warp: of every tile a block of K, its note and Q, then the other blocks, V one behind K."""
        c = self.c
        ring_q, ring_k, ring_v = rings
        sQ, sK, sV, note = staged
        rank = cute.arch.block_idx()[0] % self._ctas
        cta, ctas = cute.arch.block_idx()[0] // self._ctas, cute.arch.grid_dim()[0] // self._ctas
        turn, tile = Int32(0), place(Int32(0), cta, ctas)
        fills, blocks = Int32(0), Int32(0)  # tiles and blocks of keys loaded so far
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis])
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        while tile < order.size():
            if const_expr(c.varlen):
                slot, head, batch = tile // order.heads, tile % order.heads, Int32(0)
                if const_expr(c.causal):
                    slot = order.rows - 1 - slot
                sizes = (Int32(ins.q.shape[0]), Int32(ins.k.shape[0]))
                row, _, k0, seq = packed((ins.low, ins.high), *sizes, slot, c.tile_m)
                head = head * self._ctas + rank
                q_head = cute.domain_offset((seq.q0, 0), loads.q[None, None, head])
                k_head = cute.domain_offset((k0, 0), loads.k[None, None, head // group])
                v_head = cute.domain_offset((k0, 0), loads.v[None, None, head // group])
            else:
                row, head, batch = order.tile(tile, self.uneven)
                seq = dense(c, ins, batch)
                head = head * self._ctas + rank
                q_head = loads.q[None, None, head, batch]
                k_head, v_head = (t[None, None, head // group, batch] for t in (loads.k, loads.v))
            tQsQ, tQgQ = split(loads.q_atom, 0, 1, sQ, cute.local_tile(q_head, (c.tile_m, c.dim), (row, 0)))
            gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
            gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
            tKsK, tKgK = split(loads.k_atom, rank, self._ctas, sK, gK)  # (box, stages), (box, blocks)
            tVsV, tVgV = split(loads.v_atom, rank, self._ctas, sV, gV)
            if (row >= 0) & (row * c.tile_m < seq.tokens):
                plan = visit_rows(c, seq, row * c.tile_m, c.tile_m, scalars)
                full = ring_k.acquire(blocks, self.bytes_k)
                first = plan.block(Int32(0))
                cute.copy(loads.k_atom, tKgK[None, first], tKsK[None, ring_k.slot(blocks)], tma_bar_ptr=full, **mask)
                full, slot_q = ring_q.await_empty(fills), ring_q.slot(fills)
                with cute.arch.elect_one():
                    for i, value in enumerate((row, head, batch, *seq)):
                        note[i, slot_q] = value
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes_q)
                cute.copy(loads.q_atom, tQgQ, tQsQ[None, slot_q], tma_bar_ptr=full)
                for i in cutlass.range(1, plan.steps + 1, unroll=1):
                    n = blocks + i
                    if i < plan.steps:
                        full = ring_k.acquire(n, self.bytes_k)
                        block = plan.block(i)
                        cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
                    full = ring_v.acquire(n - 1, self.bytes_v)
                    block = plan.block(i - 1)
                    cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n - 1)], tma_bar_ptr=full, **mask)
                blocks += plan.steps
                fills += 1
            turn += 1
            tile = place(turn, cta, ctas)
        full = ring_q.await_empty(fills)
        with cute.arch.elect_one():
            note[0, ring_q.slot(fills)] = Int32(-1)
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def consume(self, ins: Inputs, outs: Outputs, scalars: Scalars, order: Order, rings, staged, qk_mma, pv_mma):
        """One warpgroup: both products, softmax and store of 64 rows of every tile."""
        c = self.c
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        *operands, note = staged
        w = self._worker(thread, rings, operands, qk_mma, pv_mma, scalars)
        if const_expr(self._turns):
            if w.group == 0:
                cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN), number_of_threads=2 * WARPGROUP)
        turn, n = Int32(0), Int32(0)
        w.q.wait(turn)
        row = cute.arch.make_warp_uniform(note[0, 0])
        while row >= 0:
            head, batch, *rest = [cute.arch.make_warp_uniform(note[i, w.q.slot(turn)]) for i in range(1, 8)]
            seq = Sequence(*rest)
            plan = visit_rows(c, seq, row * c.tile_m, c.tile_m, scalars)
            position = seq.shift + row * c.tile_m
            self.first_block(w, turn, n, seq, plan.block(Int32(0)), position)
            if const_expr(c.causal or c.window):
                for i in cutlass.range(1, plan.full, unroll=1):
                    self.next_block(w, turn, n + i, seq, plan.block(i), position, edge="both")
            for i in cutlass.range(plan.full, plan.full_end, unroll=1):
                self.next_block(w, turn, n + i, seq, plan.block(i), position, edge="")
            if const_expr(c.kv_start or c.window):
                for i in cutlass.range(plan.full_end, plan.steps, unroll=1):
                    self.next_block(w, turn, n + i, seq, plan.block(i), position, edge="left")
            cute.arch.sync_warp()  # all lanes have read the tile's note, for which one of them arrives
            w.q.release(turn)
            n += plan.steps
            self.last_product(w, n - 1)
            self.store(w, ins, outs, Place(batch, head, seq.q0, row * c.tile_m + w.row, seq.tokens))
            turn += 1
            w.q.wait(turn)
            row = cute.arch.make_warp_uniform(note[0, w.q.slot(turn)])

    def _mask(self, w, rS: cute.Tensor, seq: Sequence, block: Int32, position: Int32, edge: str) -> None:
        """Cap the scores, then give -inf to those of keys that a row must not see. ``position`` is the tile's first.

        ``edge`` says which edges of what is seen may cross the block: "both", or "left" where the right one cannot.
        """
        c = self.c
        if const_expr(c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        origin = block * c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        rows = [position + w.row, position + w.row + 8]
        start, end = seq.start - origin, seq.end - origin
        lows = highs = sinks_end = ends = None
        if const_expr(edge == "both"):
            ends = [end, end]
            if const_expr(c.causal):
                ends = [cutlass.min(end, p + 1 - origin) for p in rows]
        if const_expr(c.window):
            lows = [cutlass.max(start, p - w.scalars.window + 1 - origin) for p in rows]
            if const_expr(edge == "both" and not c.causal):
                highs = [p + w.scalars.window - origin for p in rows]
            if const_expr(c.sink_tokens):
                sinks_end = cutlass.min(start + w.scalars.sink_tokens, end)
        elif const_expr(c.kv_start):
            lows = [start, start]
        softmax.keep_within(rS, softmax.Limits(lows, highs, start if c.kv_start else None, sinks_end, ends))

    def _index(self, at: Place, token: Int32) -> tuple:
        return (at.q0 + token, at.head) if self.c.varlen else (at.batch, token, at.head)

    @cute.jit
    def store(self, w, ins: Inputs, outs: Outputs, at: Place):
        """Divide by the row sums and write out, LSE and row sum straight from registers, 16 bytes of out per lane."""
        c = self.c
        sums = []
        for r in cutlass.range_constexpr(2):
            total = w.total[r]
            for distance in (1, 2):
                total += cute.arch.shuffle_sync_bfly(total, offset=distance)
            sums.append(total)
        factors = []
        for r in cutlass.range_constexpr(2):
            top = cutlass.select_(w.top[r] == -Float32.inf, Float32(0.0), w.top[r]) * w.scalars.scale_log2
            lse = (top + cute.math.log2(sums[r], fastmath=True)) * Float32(softmax.LN_2)
            lse = cutlass.select_(sums[r] == 0.0, -Float32.inf, lse)
            weight = sums[r]
            if const_expr(c.sink):
                weight += exp2(Float32(ins.sink[at.head]) * Float32(softmax.LOG2_E) - top)
            factors.append(cute.arch.rcp_approx(cutlass.select_(sums[r] == 0.0, Float32(1.0), weight)))
            token = at.row + 8 * r
            if (w.lane % 4 == 0) & (token < at.tokens):
                outs.lse[self._index(at, token)] = lse
                if const_expr(not c.normalize):
                    outs.row_sum[self._index(at, token)] = sums[r]
        if const_expr(c.normalize):
            softmax.rescale(w.rO, factors)
        for r in cutlass.range_constexpr(2):
            token = at.row + 8 * r
            for g in cutlass.range_constexpr(c.dim_v // 32):
                pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
                words = [softmax.pack(w.rO[i], w.rO[i + 1], c.dtype) for i in pairs]
                words = softmax.transpose_quads(words, w.lane % 4)
                if token < at.tokens:
                    column = 32 * g + w.lane % 4 * 8
                    address = outs.out[(*self._index(at, token), None)].iterator + column
                    target = cute.make_tensor(
                        cute.make_ptr(Int32, address.toint(), cute.AddressSpace.gmem, assumed_align=16),
                        cute.make_layout(4),
                    )
                    values = cute.make_rmem_tensor(4, Int32)
                    for j in cutlass.range_constexpr(4):
                        values[j] = words[j]
                    cute.autovec_copy(values, target)
