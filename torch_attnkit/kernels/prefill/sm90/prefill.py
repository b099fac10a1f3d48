"""Softmax attention of many queries per sequence on Hopper: TMA loads, ``wgmma`` products, specialised warps.

    producer warp  --Q, K and V, a ring each-->  shared memory  -->  2 or 3 consumer warpgroups, 64 rows each

A consumer keeps scores, probabilities and output in registers (``mainloop.py``). Consumers take turns at issuing
products, so one's softmax runs under another's products. The grid is persistent: the producer has the next
tile's K, Q and V on the way while the consumers store the last one. Blocks of keys that no query of a tile sees are
never loaded; only blocks at an edge of what is seen are masked. Two CTAs may form a ``pair`` over two heads that share
their keys: each loads half of every block by TMA multicast.

Tile letters: M queries, N keys.
"""

import dataclasses
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax

from ..blocks import Sequence, TileScheduler, UnseenKeys, dense, key_blocks_of, packed, tile_of_round, unseen_keys
from ..types import Inputs, Outputs, Scalars
from .epilogue import Epilogue
from .mainloop import WARPGROUP, Consumer, Mainloop, Stages
from .scales import scaled
from .types import NOTE, Config, Layouts, Loads, OutputRows, WorkTile

# Registers per thread of the producer's and the consumers' warpgroups, by the number of consumers: 64 K in all.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}


@dataclass
class SharedMemory(Fixed):
    """Mbarriers, Q, K and V, and beside each stage of Q a note about its work tile. Nothing overlaps."""

    stages: Stages
    sTile: cute.Tensor  # (NOTE, q_stages), Int32: a WorkTile


@dataclass
class Mask(Fixed):
    """Which keys a consumer's rows of one work tile see."""

    w: Consumer
    c: Config
    seq: Sequence
    position: Int32  # of the tile's first row in its sequence

    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        w, c = self.w, self.c
        if const_expr(c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        origin = block * c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        rows = [self.position + w.row, self.position + w.row + 8]
        start, end = self.seq.start - origin, self.seq.end - origin
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
        softmax.apply_mask(rS, softmax.MaskBounds(lows, highs, start if c.kv_start else None, sinks_end, ends))

    def unseen(self) -> UnseenKeys:
        return unseen_keys(self.c, self.seq, self.w.scalars)


class Values(Fixed):
    """V as it lies in memory, a key's columns together, and in shared memory alike."""

    def __init__(self, config: Config, mainloop: Mainloop):
        c = self.c = config
        self.tile, self.whole = (c.tile_n, c.dim_v), (None, 0)  # a block, and all blocks of a head
        self.layout = lambda: mainloop.layout((c.tile_n, c.dim_v, c.stages))

    def view(self, v: cute.Tensor) -> cute.Tensor:
        """(S, Dv, Hkv, B); packed: (S, Dv, Hkv)"""
        return cute.make_tensor(v.iterator, cute.select(v.layout, mode=[0, 2, 1] if self.c.varlen else [1, 3, 2, 0]))

    def of_sequence(self, v_head: cute.Tensor, k0: Int32, number: Int32) -> cute.Tensor:
        """A head of a packed sequence, the ``number``-th, whose keys begin at ``k0``."""
        return cute.domain_offset((k0, 0), v_head)


class Prefill:
    """The kernel: a scheduler of persistent CTAs, a producer, and consumers with a mainloop and an epilogue."""

    def __init__(self, config: Config):
        self.c = config
        self.mainloop, self.epilogue = Mainloop(config), Epilogue(config)
        self.values = Values(config, self.mainloop)
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
            self.mainloop.layout((c.tile_m, c.dim, c.q_stages)),
            self.mainloop.layout((c.tile_n, c.dim, c.stages)),
            self.values.layout(),
        )
        modes = [0, 2, 1] if c.varlen else [1, 3, 2, 0]
        token_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        q, k, v = (self._numbers(t) for t in (ins.q, ins.k, ins.v))
        atoms = [*copies.tma_atom(token_first(q), layouts.q, 1)]
        for view, layout in ((token_first(k), layouts.k), (self.values.view(v), layouts.v)):
            atoms += copies.tma_atom(view, layout, c.ctas)
        qk_mma, pv_mma = self.mainloop.mmas()
        scheduler = self._scheduler(ins, scalars)
        self.kernel(Loads(*atoms), ins, outs, scalars, scheduler, layouts, qk_mma, pv_mma).launch(
            grid=[c.ctas * cutlass.min(scalars.sms // c.ctas, scheduler.num_tiles()), 1, 1],
            block=[WARPGROUP * (1 + c.consumers), 1, 1],
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
        scheduler: TileScheduler,
        layouts: Layouts,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self._shared_memory(cutlass.memory.SmemAllocator(), warp, layouts)
        if warp == 0:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        self._sync_cluster()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp == 0:
                self.produce(loads, ins, scalars, scheduler, smem)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.consume(ins, outs, scalars, smem, qk_mma, pv_mma)
        if const_expr(c.pair):
            self._sync_cluster()  # neither CTA may leave while the other still writes to its memory

    def _numbers(self, t: cute.Tensor) -> cute.Tensor:
        """E4M3 comes as bytes."""
        return (
            t if self.c.dtype.width > 8 else cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.c.dtype), t.layout)
        )

    def _shared_memory(self, memory, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        rings = self.mainloop.rings(memory, warp, ((c.q_stages, False), (c.stages, c.pair), (c.stages, c.pair)))
        stages = Stages(*rings, *self.mainloop.operands(memory, layouts))
        sTile = memory.allocate_tensor(Int32, cute.make_layout((NOTE, c.q_stages)), 16)
        return SharedMemory(stages, sTile)

    def _sync_cluster(self) -> None:
        """All threads of the CTA, or of both CTAs of a pair."""
        if const_expr(self.c.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _scheduler(self, ins: Inputs, scalars: Scalars) -> TileScheduler:
        c = self.c
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // c.tile_m + Int32(ins.low.shape[0])
            return TileScheduler(slots, Int32(ins.q.shape[1]) // c.ctas, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.tile_m - 1)) // c.tile_m
        return TileScheduler(rows, Int32(ins.q.shape[2]) // c.ctas, Int32(ins.q.shape[0]), scalars.section)

    @cute.jit
    def produce(self, loads: Loads, ins: Inputs, scalars: Scalars, scheduler: TileScheduler, smem: SharedMemory):
        """One warp: of every tile a block of K, its note and Q, then the other blocks, V one behind K."""
        c = self.c
        stages, sTile = smem.stages, smem.sTile
        ring_q, ring_k, ring_v = stages.ring_q, stages.ring_k, stages.ring_v
        rank = cute.arch.block_idx()[0] % c.ctas
        cta, ctas = cute.arch.block_idx()[0] // c.ctas, cute.arch.grid_dim()[0] // c.ctas
        number, tile = Int32(0), tile_of_round(Int32(0), cta, ctas)
        fills, blocks = Int32(0), Int32(0)  # tiles and blocks of keys loaded so far
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis])
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        while tile < scheduler.num_tiles():
            if const_expr(c.varlen):
                slot, head = tile // scheduler.heads, tile % scheduler.heads
                if const_expr(c.causal):
                    slot = scheduler.rows - 1 - slot
                sizes = (Int32(ins.q.shape[0]), Int32(ins.k.shape[0]))
                row, batch, k0, seq = packed((ins.low, ins.high), *sizes, slot, c.tile_m)
                head = head * c.ctas + rank
                q_head = cute.domain_offset((seq.q0, 0), loads.q[None, None, head])
                k_head = cute.domain_offset((k0, 0), loads.k[None, None, head // group])
                v_head = self.values.of_sequence(loads.v[None, None, head // group], k0, batch)
            else:
                row, head, batch = scheduler.work_tile(tile, c.uneven)
                seq = dense(c, ins, batch)
                head = head * c.ctas + rank
                q_head = loads.q[None, None, head, batch]
                k_head, v_head = (t[None, None, head // group, batch] for t in (loads.k, loads.v))
            gQ = cute.local_tile(q_head, (c.tile_m, c.dim), (row, 0))
            tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, stages.sQ, gQ)
            gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
            gV = cute.local_tile(v_head, self.values.tile, self.values.whole)
            tKsK, tKgK = copies.tma_partition(loads.k_atom, rank, c.ctas, stages.sK, gK)  # (box, stages), (box, blocks)
            tVsV, tVgV = copies.tma_partition(loads.v_atom, rank, c.ctas, stages.sV, gV)
            if (row >= 0) & (row * c.tile_m < seq.tokens):
                visit = key_blocks_of(c, seq, row * c.tile_m, c.tile_m, scalars)
                full = ring_k.acquire(blocks, self.bytes_k)
                first = visit.block(Int32(0))
                cute.copy(loads.k_atom, tKgK[None, first], tKsK[None, ring_k.slot(blocks)], tma_bar_ptr=full, **mask)
                full, slot_q = ring_q.await_empty(fills), ring_q.slot(fills)
                with cute.arch.elect_one():
                    for i, value in enumerate(WorkTile(row, head, batch, seq).note()):
                        sTile[i, slot_q] = value
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes_q)
                cute.copy(loads.q_atom, tQgQ, tQsQ[None, slot_q], tma_bar_ptr=full)
                for i in cutlass.range(1, visit.steps + 1, unroll=1):
                    n = blocks + i
                    if i < visit.steps:
                        full = ring_k.acquire(n, self.bytes_k)
                        block = visit.block(i)
                        cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
                    full = ring_v.acquire(n - 1, self.bytes_v)
                    block = visit.block(i - 1)
                    cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n - 1)], tma_bar_ptr=full, **mask)
                blocks += visit.steps
                fills += 1
            number += 1
            tile = tile_of_round(number, cta, ctas)
        full = ring_q.await_empty(fills)
        with cute.arch.elect_one():
            sTile[0, ring_q.slot(fills)] = Int32(-1)
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def consume(self, ins: Inputs, outs: Outputs, scalars: Scalars, smem: SharedMemory, qk_mma, pv_mma):
        """One warpgroup: both products, softmax and store of 64 rows of every tile."""
        c = self.c
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        ring_q, sTile = smem.stages.ring_q, smem.sTile
        w = self.mainloop.consumer(thread, smem.stages, qk_mma, pv_mma, scalars)
        self.mainloop.begin_turns(w)
        fill, n = Int32(0), Int32(0)
        ring_q.wait(fill)
        row = cute.arch.make_warp_uniform(sTile[0, 0])
        while row >= 0:
            rest = [cute.arch.make_warp_uniform(sTile[i, ring_q.slot(fill)]) for i in range(1, NOTE)]
            tile = WorkTile.of([row, *rest])
            seq = tile.seq
            visit = key_blocks_of(c, seq, row * c.tile_m, c.tile_m, scalars)
            here = dataclasses.replace(w, scalars=scaled(c, ins, scalars, tile))
            mask = Mask(here, c, seq, seq.shift + row * c.tile_m)
            self.mainloop.first_block(here, mask, fill, n, visit.block(Int32(0)))
            if const_expr(c.causal or c.window):
                for i in cutlass.range(1, visit.full, unroll=1):
                    self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="both")
            for i in cutlass.range(visit.full, visit.full_end, unroll=1):
                self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="")
            if const_expr(c.kv_start or c.window):
                for i in cutlass.range(visit.full_end, visit.steps, unroll=1):
                    self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="left")
            cute.arch.sync_warp()  # all lanes have read the tile's note, for which one of them arrives
            ring_q.release(fill)
            n += visit.steps
            self.mainloop.last_product(here, n - 1)
            rows = OutputRows(tile.batch, tile.head, seq.q0, row * c.tile_m + w.row, seq.tokens)
            self.epilogue.store(here, ins, outs, rows)
            fill += 1
            ring_q.wait(fill)
            row = cute.arch.make_warp_uniform(sTile[0, ring_q.slot(fill)])
