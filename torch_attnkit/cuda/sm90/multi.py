"""Softmax attention of a block of queries per sequence over its cache on Hopper: K and V cross memory once.

    producer warp  --K and V, a ring each, by TMA-->  shared memory  -->  1 or 2 consumer warpgroups, 64 rows each
    the CTAs of a cluster share the keys of a tile, and merge through distributed shared memory

The rows of a tile are all query heads of a KV head for as many queries as fit: 16 queries with 4 heads each fill one
``wgmma``. Consumers keep scores, probabilities and output in registers, as in ``prefill_products.py``. Where tiles
alone do not fill the machine, the CTAs of a cluster take a share of a tile's keys each. When they are through, every
CTA puts its output and row statistics into its shared memory and adds up a slice of all of theirs: no partial result
goes through device memory, nothing is counted, and no CTA waits for one that may not be running. Where tiles do fill
the machine, two CTAs may form a ``pair`` on neighbouring tiles: each loads half of every block for both, by multicast.

Tile letters: M rows, N keys. Shared memory: Q (M, D), K (N, D, stages), V (N, Dv, stages), and two mbarriers a stage;
partial results lie over all three when these have been read.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies

from ..prefill_tiles import Sequence
from ..ring import Ring
from . import multi_merge as merge
from . import prefill_softmax as softmax
from .multi_tiles import Rules, Task, advance, sight, visit
from .multi_types import Config, Inputs, Layouts, Loads, Outputs, Scalars
from .prefill_products import WARPGROUP, Barrier, Products, split

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor).
_REGISTERS = {(1, 1): (56, 256), (1, 2): (24, 232), (2, 1): (24, 240)}


class Multi(Products):
    def __init__(self, config: Config):
        super().__init__(config)
        assert config.part_bytes <= config.staged_bytes, config
        self.regs_load, self.regs_mma = _REGISTERS[config.consumers, config.per_sm]

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream: Any):
        c = self.c
        self.bytes_k, self.bytes_v = (c.tile_n * dim * c.dtype.width // 8 for dim in (c.dim, c.dim_v))
        layouts = Layouts(
            self._staged((c.tile_m, c.dim, 1)),
            self._staged((c.tile_n, c.dim, c.stages)),
            self._staged((c.tile_n, c.dim_v, c.stages)),
        )
        load = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else cpasync.CopyBulkTensorTileG2SOp()
        atoms = []
        for tensor, layout in ((ins.k, layouts.k), (ins.v, layouts.v)):
            tile = cute.select(layout, mode=[0, 1])
            shape = (cute.size(tile, mode=[0]), cute.size(tile, mode=[1]))
            keys_first = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
            atoms += cpasync.make_tiled_tma_atom(load, keys_first, tile, shape, 2 if c.pair else 1)
        qk_mma, pv_mma = self._mmas()
        tiles = self._row_tiles(ins) * Int32(ins.k.shape[1]) * Int32(ins.q.shape[0])
        self.kernel(Loads(*atoms), ins, outs, scalars, layouts, qk_mma, pv_mma).launch(
            grid=[tiles * scalars.ctas, 1, 1],
            block=[WARPGROUP + c.threads, 1, 1],
            cluster=[scalars.ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=c.per_sm,
            preferred_smem_carveout=100,
        )

    @property
    def _span(self) -> int:
        """Rows of a cluster."""
        return self.c.tile_m * (2 if self.c.pair else 1)

    def _row_tiles(self, ins: Inputs) -> Int32:
        """Clusters that the rows of a KV head need, each for its keys or a part of them."""
        rows = Int32(ins.q.shape[1]) * (Int32(ins.q.shape[2]) // Int32(ins.k.shape[1]))
        return (rows + (self._span - 1)) // self._span

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
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
        ]  # (M, D, 1), (N, D, stages), (N, Dv, stages)
        if warp == 0:
            for atom in (loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        task = self._task(ins, scalars)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.pair):
            self._meet()  # neither CTA may write to the other before its barriers stand
        else:
            cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp == 0:
                self.produce(loads, task, rings, staged)
            self._idle_through_merge(scalars)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.consume(ins, outs, scalars, task, rings, staged, qk_mma, pv_mma)

    def _meet(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _idle_through_merge(self, scalars: Scalars):
        """The producer's part in the meetings of ``finish``."""
        if scalars.ctas > 1:
            self._meet()
            if const_expr(not self.c.pair):
                self._meet()

    @cute.jit
    def _rings(self, memory, warp: Int32):
        c = self.c
        rings = []
        for _ in cutlass.range_constexpr(2):
            full = memory.allocate_array(cutlass.Int64, c.stages)
            empty = memory.allocate_array(cutlass.Int64, c.stages)
            rings.append(Ring(full, empty, c.stages, c.pair))
        if warp == 0:
            with cute.arch.elect_one():
                for ring in rings:
                    for i in cutlass.range_constexpr(ring.stages):
                        cute.arch.mbarrier_init(ring.full + i, 1)
                        cute.arch.mbarrier_init(ring.empty + i, 4 * c.consumers * (2 if ring.pair else 1))
        return rings

    @cute.jit
    def _task(self, ins: Inputs, scalars: Scalars):
        """What this CTA computes. Lengths outside of what the caches hold are cut off; later rows come first."""
        c = self.c
        rank, tile = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.cluster_idx()[0])
        row_tiles, heads = Uint32(self._row_tiles(ins)), Uint32(ins.k.shape[1])
        others = tile // row_tiles
        batch = Int32(others // heads)
        kv_head = Int32(others) - batch * Int32(heads)
        keys, tokens = Int32(ins.k.shape[2]), Int32(ins.q.shape[1])
        end = cutlass.max(cutlass.min(Int32(ins.kv_len[batch]), keys), Int32(0))
        start = Int32(0)
        if scalars.has_start != 0:
            start = cutlass.max(cutlass.min(Int32(ins.kv_start[batch]), keys), Int32(0))
        group = Int32(Uint32(ins.q.shape[2]) // heads)
        inverse = cute.arch.rcp_approx(Float32(group))
        begin = Int32(row_tiles - 1 - (tile - others * row_tiles)) * self._span
        left = tokens * group - begin
        token = Int32(Uint32(begin) // Uint32(group))
        rest = begin - token * group
        seq = Sequence(Int32(0), tokens, end - tokens, start, end)
        last = token + advance(rest + cutlass.min(left, self._span) - 1, group, inverse)[0]
        blocks = visit(seq, seq.shift + token, seq.shift + last, c.tile_n, self._rules(scalars))
        first, stop = Int32(0), blocks.steps
        if const_expr(c.pair):
            more, rest = advance(rest + rank * c.tile_m, group, inverse)
            token += more
            left -= rank * c.tile_m
        else:
            each = Int32(Uint32(blocks.steps) // Uint32(scalars.ctas))
            extra = blocks.steps - each * scalars.ctas
            first = rank * each + cutlass.min(rank, extra)
            stop = first + each + cutlass.select_(rank < extra, Int32(1), Int32(0))
        rows = cutlass.min(left, c.tile_m)
        return Task(batch, kv_head, group, inverse, token, rest, rows, seq, blocks, first, stop)

    def _rules(self, scalars: Scalars) -> Rules:
        return Rules(scalars.causal, scalars.window, scalars.sink_tokens)

    @cute.jit
    def produce(self, loads: Loads, task: Task, rings, staged):
        """One warp: the blocks of K and of V, V one behind K."""
        c = self.c
        ring_k, ring_v = rings
        _, sK, sV = staged
        ctas = const_expr(2 if c.pair else 1)
        rank = cute.arch.block_in_cluster_idx()[0] if c.pair else Int32(0)
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        k_head, v_head = (t[None, None, task.kv_head, task.batch] for t in (loads.k, loads.v))
        gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
        gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
        tKsK, tKgK = split(loads.k_atom, rank, ctas, sK, gK)  # (box, stages), (box, blocks)
        tVsV, tVgV = split(loads.v_atom, rank, ctas, sV, gV)
        count = task.stop - task.first
        for n in cutlass.range(0, count + 1, unroll=1):
            if n < count:
                full = ring_k.acquire(n, self.bytes_k)
                block = task.block(task.first + n)
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
            if n > 0:
                full = ring_v.acquire(n - 1, self.bytes_v)
                block = task.block(task.first + n - 1)
                cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n - 1)], tma_bar_ptr=full, **mask)

    @cute.jit
    def consume(self, ins: Inputs, outs: Outputs, scalars: Scalars, task: Task, rings, staged, qk_mma, pv_mma):
        """One warpgroup: both products, softmax and store of 64 rows."""
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        alone = Ring(None, None, 1)  # Q, which nobody loads twice
        w = self._worker(thread, [alone, *rings], staged, qk_mma, pv_mma, scalars)
        self._load_queries(ins, task, staged[0], w)
        w.positions = tuple(task.position(w.row + 8 * r) for r in range(2))
        w.sight = sight(task.seq, w.positions, self._rules(scalars))
        w.rO.fill(0.0)
        w.top.fill(-Float32.inf)
        w.total.fill(0.0)
        if const_expr(self._turns):
            if w.group == 0:
                cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN), number_of_threads=2 * WARPGROUP)
        zero, first, stop = Int32(0), task.first, task.stop
        if first < stop:
            self.first_block(w, zero, zero, task.seq, task.block(first), zero)
            plain = cutlass.max(first + 1, cutlass.min(task.edges, stop))
            for i in cutlass.range(first + 1, plain, unroll=1):
                self.next_block(w, zero, i - first, task.seq, task.block(i), zero, edge="both")
            for i in cutlass.range(plain, stop, unroll=1):
                self.next_block(w, zero, i - first, task.seq, task.block(i), zero, edge="")
            self.last_product(w, stop - first - 1)
        self.finish(w, ins, outs, scalars, task, staged)

    @cute.jit
    def _load_queries(self, ins: Inputs, task: Task, sQ: cute.Tensor, w):
        """The 64 rows of a warpgroup, through registers: neighbouring rows may be far apart, or of different queries.

        Rows behind the last repeat it; a tile without rows repeats the last query.
        """
        c = self.c
        thread, chunks = cute.arch.thread_idx()[0] % WARPGROUP, c.dim // 8
        vectors = copies.fragments(64 * chunks // WARPGROUP, 8, c.dtype)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            row = cutlass.max(cutlass.min(w.group * 64 + i // chunks, task.rows - 1), 0)
            token, head = task.place(row)
            token = cutlass.min(token, task.seq.tokens - 1)
            copies.load(ins.q[task.batch, token, head, None].iterator + i % chunks * 8, vector)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            cute.autovec_copy(vector, cute.local_tile(sQ[w.group * 64 + i // chunks, None, 0], (8,), (i % chunks,)))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(Barrier.BROUGHT) + w.group, number_of_threads=WARPGROUP)

    @cute.jit
    def _mask(self, w, rS: cute.Tensor, seq: Sequence, block: Int32, position: Int32, edge: cutlass.Constexpr):
        if const_expr(self.c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        s = w.sight
        origin = block * self.c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        lows, highs, sinks_ends = ([x - origin for x in limits] for limits in (s.lows, s.highs, s.sinks_ends))
        if w.scalars.sink_tokens > 0:
            merge.keep_near_and_sinks(rS, (lows, highs), s.start - origin, sinks_ends)
        else:
            softmax.keep_within(rS, softmax.Limits(lows, highs))

    @cute.jit
    def finish(self, w, ins: Inputs, outs: Outputs, scalars: Scalars, task: Task, staged):
        """Write the rows out, alone or together with the other CTAs of the cluster."""
        c = self.c
        sums = merge.row_sums(w)
        if const_expr(c.pair):
            merge.store(c, w, ins, outs, task, sums)
            self._meet()  # neither CTA may leave while the other still writes to its memory
        else:
            if scalars.ctas == 1:
                merge.store(c, w, ins, outs, task, sums)
            else:
                self._await_consumers()
                merge.publish(c, w, staged[0].iterator.toint(), sums)
                self._meet()
                merge.add(c, ins, outs, scalars, task, staged[0].iterator.toint())
                self._meet()  # nor may one whose memory another still reads
