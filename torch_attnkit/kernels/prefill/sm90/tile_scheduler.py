"""Which work tiles a CTA has, and what its warps do with them.

A kernel (``kernel.py``) has one scheduler, which is told how CTAs begin and what their producer warpgroup and their
consumer warpgroups run:

    StaticPersistent   a CTA has one tile of each round, of one head; the producer warp is a tile ahead
    DynamicPersistent  a CTA takes tiles from a counter, which a scheduler warp does ahead of all others
    SingleTile         a CTA has one tile, or with its cluster a part of its keys (``split_kv_scheduler.py``)
    StreamK            a CTA has a run of the blocks of keys of all tiles (there, too)

All but the first have tiles whose rows are a KV head's query heads times queries (PackGQA), and do with them what a
``Collective`` does.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import atomics, copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.compiler_barrier import compiler_barrier
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm90 import softmax

from ..key_blocks import KeyBlocks, Sequence, TileScheduler, dense, key_blocks_of, packed, tile_of_round
from ..types import Inputs, Scalars
from .config import WARPGROUP, Config, GroupScalars, Layouts, OutputRows, StaticTile, TileCounter
from .epilogue import Epilogue, V, descale, row_sums, store, with_descales
from .load_tma import KVLoads, QLoads, RowBoxes, SharedMemory, TileCopies, TmaLoader, elements, select
from .mainloop import Consumer, Mainloop, NamedBarrier, Stages
from .mask import BitMask, BoundsMask, MaskRules, row_bounds
from .seqlen import Sequences, WorkTile, fixed_group

_TILES = 4  # of the dynamic scheduler, work tiles that are known: the consumers' and those ahead
_SHORT = 4  # blocks of keys, up to which a work tile is over before the next could be taken and found
_QUERIES, _SCHEDULER = 2, 3  # its warps behind those that load keys
_STATIC_INFO = len(StaticTile._fields) - 1 + len(Sequence._fields)


class Arguments(NamedTuple):
    """What a kernel is given, beside copies and products."""

    ins: Any
    outs: Any
    scalars: Any
    work: Any  # the scheduler's


class Scheduler:
    """``launch_shape``, ``layouts`` and ``launch`` are the host's: what the kernel is given (copies, the scheduler's
    ``work``, both products), and how many CTAs there are. ``first`` is what a CTA finds before its barriers stand,
    ``produce`` the producer warpgroup's, ``consume`` the consumers'."""

    def __init__(self, config: Config, mainloop: Mainloop, registers: tuple[int, int]):
        self.c, self.mainloop = config, mainloop
        self.registers = registers  # per thread of the producer's and the consumers' warpgroups

    def first(self, ins: Any, scalars: Any) -> tuple[Any, Any]:
        """And whether there is any."""
        return None, True

    def finish(self) -> None:
        """Nothing is left to wait for."""


class TileInfoRing(Fixed):
    """Work tile info in shared memory, from the scheduler's warp to all others: a tile after another, -1 behind the
    last."""

    def __init__(self, ring: Ring, sInfo: cute.Tensor):
        self.ring, self.sInfo = ring, sInfo  # (TILE_INFO, stages), Int32

    def write(self, n: Int32, values: list[Int32]) -> None:
        full = self.ring.await_empty(n)
        with cute.arch.elect_one():
            for i, value in enumerate(values):
                self.sInfo[i, self.ring.slot(n)] = value
            cute.arch.mbarrier_arrive(full)

    def wait(self, n: Int32) -> Int32:
        """The info's first number, when it is there."""
        self.ring.wait(n)
        return cute.arch.make_warp_uniform(self.sInfo[0, self.ring.slot(n)])

    def read(self, n: Int32) -> list[Int32]:
        return [cute.arch.make_warp_uniform(self.sInfo[i, self.ring.slot(n)]) for i in range(TILE_INFO)]

    def release(self, n: Int32) -> None:
        """All lanes have read it, for which one of them arrives."""
        cute.arch.sync_warp()
        self.ring.release(n)


class TileInfo(NamedTuple):
    """Work tile info: a work tile, or of stream-K a split of it."""

    tile: WorkTile
    kv_index: Int32  # by which its keys are found (``seqlen.Sequences``)
    number: Int32  # of the tile in its sequence
    ctas: Int32  # that have a part of the tile; 1: all of it is here, 0: this is none
    first: Int32  # of them
    early: Int32  # 1 where that had another part before, else 0

    def values(self) -> list[Int32]:
        """Without what ``of`` is told."""
        t = self.tile
        return [*self[1:], t.batch, t.kv_head, t.token, t.head, t.rows, t.first, t.stop, *t.seq, *t.blocks]

    @classmethod
    def of(cls, values: list[Int32], group: tuple) -> TileInfo:
        """From ``TILE_INFO`` numbers."""
        batch, kv_head, token, head, rows, first, stop = values[5:12]
        seq, blocks = Sequence(*values[12:17]), KeyBlocks(*values[17:])
        tile = WorkTile(batch, kv_head, *group, token, head, rows, seq, blocks, first, stop)
        return cls(tile, *values[:5])


TILE_INFO = 12 + len(Sequence._fields) + len(KeyBlocks._fields)


# One head a tile.


class StaticLoads(NamedTuple):
    q: QLoads
    kv: KVLoads


class StaticPersistent(Scheduler):
    """Persistent CTAs, or pairs on two heads that share their keys: each has one tile of each round.

    Rings of Q with its tile's info, of K and of V: 1 arrival fills a stage, by the producer warp; 4 for each consumer
    warpgroup, of both CTAs of a pair for K and V, empty it. The producer has the next tile's K, Q and V on the way
    while the consumers store the last one.
    """

    def __init__(self, config: Config, mainloop: Mainloop, epilogue: Epilogue):
        # The producer of packed pairs spills with the 24 registers that it has beside consumers of 240.
        registers = {1: (56, 256), 2: (24, 240), 3: (32, 160)}[config.consumers]
        super().__init__(config, mainloop, (40, 232) if config.hdim512 else registers)
        self.epilogue = epilogue

    def launch_shape(self, scalars: Scalars) -> dict[str, Any]:
        block = [WARPGROUP * (1 + self.c.consumers), 1, 1]
        return {"block": block, "cluster": [self.c.ctas, 1, 1], "min_blocks_per_mp": 1}

    def layouts(self) -> Layouts:
        c = self.c
        shapes = (c.tile_m, c.dim, c.q_stages), (c.tile_n, c.dim, c.stages), (*self._tile_v, c.stages)
        return Layouts(*(self.mainloop.layout(shape) for shape in shapes))

    @property
    def _tile_v(self) -> tuple[int, int]:
        """A block of V: of E4M3, which was transposed, a column's keys are together."""
        c = self.c
        return (c.dim_v, c.tile_n) if c.fp8 else (c.tile_n, c.dim_v)

    def launch(self, ins: Inputs, scalars: Scalars, workspace: None, layouts: Layouts) -> tuple:
        c = self.c
        loads, mmas, tiles = self._loads(ins, layouts), self.mainloop.mmas(), self._tiles(ins, scalars)
        return loads, tiles, mmas, c.ctas * cutlass.min(scalars.sms // c.ctas, tiles.num_tiles())

    def _loads(self, ins: Inputs, layouts: Layouts) -> StaticLoads:
        c = self.c
        modes = (0, 2, 1) if c.varlen else (1, 3, 2, 0)
        modes_v = modes if not c.fp8 else (1, 2, 0) if c.varlen else (2, 3, 1, 0)
        q, k, v = (elements(c, t) for t in (ins.q, ins.k, ins.v))
        of_q = QLoads(*copies.tma_atom(select(q, modes), layouts.q, 1))
        atoms = []
        for view, layout in ((select(k, modes), layouts.k), (select(v, modes_v), layouts.v)):
            atoms += copies.tma_atom(view, layout, c.ctas)
        return StaticLoads(of_q, KVLoads(*atoms))

    def _tiles(self, ins: Inputs, scalars: Scalars) -> TileScheduler:
        c = self.c
        if const_expr(c.varlen):
            slots = Int32(ins.q.shape[0]) // c.tile_m + Int32(ins.low.shape[0])
            return TileScheduler(slots, Int32(ins.q.shape[1]) // c.ctas, Int32(1), scalars.section)
        rows = (Int32(ins.q.shape[1]) + (c.tile_m - 1)) // c.tile_m
        return TileScheduler(rows, Int32(ins.q.shape[2]) // c.ctas, Int32(ins.q.shape[0]), scalars.section)

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts, work: TileScheduler) -> SharedMemory:
        """Nothing overlaps."""
        c = self.c
        rings_of = self.mainloop.rings(memory, warp, ((c.q_stages, False), (c.stages, c.pair), (c.stages, c.pair)))
        stages = Stages(*rings_of, *self.mainloop.operands(memory, layouts))
        self.sInfo = memory.allocate_tensor(Int32, cute.make_layout((_STATIC_INFO, c.q_stages)), 16)
        return SharedMemory(stages)

    def prefetch(self, loads: StaticLoads) -> None:
        cpasync.prefetch_descriptor(loads.q.atom)
        loads.kv.prefetch()

    @cute.jit
    def produce(self, args: Arguments, loads: StaticLoads, smem: SharedMemory, warp: Int32, first: None):
        if warp == 0:
            self.load(args, loads, smem)

    @cute.jit
    def load(self, args: Arguments, loads: StaticLoads, smem: SharedMemory):
        """One warp: of every tile a block of K, its info and Q, then the other blocks, V one behind K."""
        c, (ins, _, scalars, work) = self.c, args
        stages, sInfo, kv = smem.stages, self.sInfo, loads.kv
        ring_q, ring_k, ring_v = stages.ring_q, stages.ring_k, stages.ring_v
        rank = cute.arch.block_idx()[0] % c.ctas
        cta, ctas = cute.arch.block_idx()[0] // c.ctas, cute.arch.grid_dim()[0] // c.ctas
        number, tile = Int32(0), tile_of_round(Int32(0), cta, ctas)
        fills, blocks = Int32(0), Int32(0)  # tiles and blocks of keys loaded so far
        axis = 1 if c.varlen else 2
        group = Int32(ins.q.shape[axis]) // Int32(ins.k.shape[axis])
        while tile < work.num_tiles():
            if const_expr(c.varlen):
                slot, head = tile // work.heads, tile % work.heads
                if const_expr(c.causal):
                    slot = work.rows - 1 - slot
                sizes = (Int32(ins.q.shape[0]), Int32(ins.k.shape[0]))
                row, batch, k0, seq = packed((ins.low, ins.high), *sizes, slot, c.tile_m)
                head = head * c.ctas + rank
                q_head = cute.domain_offset((seq.q0, 0), loads.q.q[None, None, head])
                k_head = cute.domain_offset((k0, 0), kv.k[None, None, head // group])
                v_head = self._values_from(kv.v[None, None, head // group], k0, batch)
            else:
                row, head, batch = work.work_tile(tile, c.uneven)
                seq = dense(c, ins, batch)
                head = head * c.ctas + rank
                q_head = loads.q.q[None, None, head, batch]
                k_head, v_head = (t[None, None, head // group, batch] for t in (kv.k, kv.v))
            gQ = cute.local_tile(q_head, (c.tile_m, c.dim), (row, 0))
            tQsQ, tQgQ = copies.tma_partition(loads.q.atom, 0, 1, stages.sQ, gQ)
            gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
            gV = cute.local_tile(v_head, self._tile_v, (0, None) if c.fp8 else (None, 0))
            copy = TileCopies(c, kv, gK, gV, rank, ((ring_k, stages.sK), (ring_v, stages.sV)))
            if (row >= 0) & (row * c.tile_m < seq.tokens):
                visit = key_blocks_of(c, seq, row * c.tile_m, c.tile_m, scalars)
                copy.load_k(blocks, visit.block, Int32(0))
                full, slot_q = ring_q.await_empty(fills), ring_q.slot(fills)
                with cute.arch.elect_one():
                    for i, value in enumerate(StaticTile(row, head, batch, seq).info()):
                        sInfo[i, slot_q] = value
                    cute.arch.mbarrier_arrive_and_expect_tx(full, c.tile_m * c.dim * c.dtype.width // 8)
                cute.copy(loads.q.atom, tQgQ, tQsQ[None, slot_q], tma_bar_ptr=full)
                for i in cutlass.range(1, visit.steps + 1, unroll=1):
                    n = blocks + i
                    if i < visit.steps:
                        copy.load_k(n, visit.block, i)
                    copy.load_v(n - 1, visit.block, i - 1)
                blocks += visit.steps
                fills += 1
            number += 1
            tile = tile_of_round(number, cta, ctas)
        full = ring_q.await_empty(fills)
        with cute.arch.elect_one():
            sInfo[0, ring_q.slot(fills)] = Int32(-1)
            cute.arch.mbarrier_arrive(full)

    def _values_from(self, v_head: cute.Tensor, k0: Int32, number: Int32) -> cute.Tensor:
        """A head of a packed sequence, the ``number``-th, whose keys begin at ``k0``; in V that was transposed, at a
        multiple of a block."""
        if self.c.fp8:
            return cute.domain_offset((0, (k0 // self.c.tile_n + number) * self.c.tile_n), v_head)
        return cute.domain_offset((k0, 0), v_head)

    @cute.jit
    def consume(self, args: Arguments, smem: SharedMemory, mmas: tuple, first: None):
        """One warpgroup: both products, softmax and store of 64 rows of every tile."""
        c, (ins, outs, scalars, _) = self.c, args
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        ring_q, sInfo = smem.stages.ring_q, self.sInfo
        w = self.mainloop.consumer(thread, smem.stages, *mmas, scalars)
        self.mainloop.begin_ping_pong(w)
        fill, n = Int32(0), Int32(0)
        ring_q.wait(fill)
        row = cute.arch.make_warp_uniform(sInfo[0, 0])
        while row >= 0:
            rest = [cute.arch.make_warp_uniform(sInfo[i, ring_q.slot(fill)]) for i in range(1, _STATIC_INFO)]
            tile = StaticTile.of([row, *rest])
            seq = tile.seq
            visit = key_blocks_of(c, seq, row * c.tile_m, c.tile_m, scalars)
            here = dataclasses.replace(w, scalars=with_descales(c, ins, scalars, tile.batch, tile.head))
            mask = BoundsMask(here, c, seq, seq.shift + row * c.tile_m)
            self.mainloop.first_block(here, mask, fill, n, visit.block(Int32(0)))
            if const_expr(c.causal or c.window):
                for i in cutlass.range(1, visit.full, unroll=1):
                    self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="both")
            for i in cutlass.range(visit.full, visit.full_end, unroll=1):
                self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="")
            if const_expr(c.kv_start or c.window):
                for i in cutlass.range(visit.full_end, visit.steps, unroll=1):
                    self.mainloop.next_block(here, mask, fill, n + i, visit.block(i), edge="left")
            cute.arch.sync_warp()  # all lanes have read the tile's info, for which one of them arrives
            ring_q.release(fill)
            n += visit.steps
            self.mainloop.last_product(here, n - 1)
            rows = OutputRows(tile.batch, tile.head, seq.q0, row * c.tile_m + w.row, seq.tokens)
            self.epilogue.store(here, ins, outs, rows)
            fill += 1
            ring_q.wait(fill)
            row = cute.arch.make_warp_uniform(sInfo[0, ring_q.slot(fill)])

    def finish(self) -> None:
        if const_expr(self.c.pair):
            sync_cluster()  # neither CTA may leave while the other still writes to its memory


def sync_cluster() -> None:
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# A KV head's query heads share a tile.


class Collective:
    """What the warps of a CTA do together for a work tile (CUTLASS's word), whoever says which tile that is: its
    ``loader`` brings K and V, consumers keep scores, probabilities and output of 64 rows each in registers.

    The rows of a tile are all query heads of a KV head for as many queries as fit: 16 queries with 4 heads each fill
    one ``wgmma``. K and V cross memory once.
    """

    def __init__(self, config: Config, mainloop: Mainloop, sequences: Sequences, loader: TmaLoader):
        self.c, self.mainloop, self.sequences, self.loader = config, mainloop, sequences, loader

    def consumer(self, scalars: GroupScalars, smem: SharedMemory, mmas: tuple) -> Consumer:
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        return self.mainloop.consumer(thread, smem.stages, *mmas, scalars)

    def attend(
        self, w: Consumer, rows: Any, scalars: GroupScalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> tuple[Consumer, list[Float32]]:
        """Leaves the output of 64 rows in registers, not divided yet; returns the consumer with this tile's scalars,
        and the sums of a lane's two rows.

        Where K and V are E4M3, q's and k's scales fold into the scale of the scores, v's into the output.
        """
        c = self.c
        if not any(c.scales):
            self._load_queries(rows, tile, smem.stages.sQ, w)
            return w, self.attend_loaded(w, scalars, tile, Int32(0), fills)
        head = tile.kv_head * tile.group
        here = dataclasses.replace(w, scalars=with_descales(c, rows, scalars, tile.batch, head))
        self._load_queries(rows._replace(q=elements(c, rows.q)), tile, smem.stages.sQ, here)
        sums = self.attend_loaded(here, scalars, tile, Int32(0), fills)
        unit = Float32(2.0**-c.p_offset)
        factor = descale(c, rows, tile.batch, head, V) * unit
        # Of a sequence without keys the scale may be nan.
        softmax.rescale(here.rO, [cutlass.select_(x == 0.0, unit, factor) for x in sums])
        return here, [x * unit for x in sums]

    @cute.jit
    def attend_loaded(self, w: Consumer, scalars: GroupScalars, tile: WorkTile, fill: Int32, fills: Int32):
        """The same with the rows that fill ``fill`` of their ring brought, without scales."""
        positions = tuple(tile.position(w.row + 8 * r) for r in range(2))
        mask = BitMask(w, self.c, tile.seq, row_bounds(tile.seq, positions, MaskRules.of(scalars)))
        w.rO.fill(0.0)
        w.row_max.fill(-Float32.inf)
        w.row_sum.fill(0.0)
        first, stop = tile.first, tile.stop
        before = fills - first
        if first < stop:
            self.mainloop.first_block(w, mask, fill, fills, tile.block(first))
            plain = cutlass.max(first + 1, cutlass.min(tile.masked, stop))
            for i in cutlass.range(first + 1, plain, unroll=1):
                self.mainloop.next_block(w, mask, fill, before + i, tile.block(i), edge="both")
            for i in cutlass.range(plain, stop, unroll=1):
                self.mainloop.next_block(w, mask, fill, before + i, tile.block(i), edge="")
            w.stages.ring_q.release(fill)
            self.mainloop.last_product(w, before + stop - 1)
        else:
            w.stages.ring_q.release(fill)
        return row_sums(self.c, w, positions)

    @cute.jit
    def _load_queries(self, ins: Any, tile: WorkTile, sQ: cute.Tensor, w: Consumer):
        """The 64 rows of a warpgroup, through registers: neighbouring rows may be far apart, or of different queries.

        Rows behind the last repeat it; a tile without rows repeats the last query.
        """
        c = self.c
        width = const_expr(128 // c.dtype.width)  # elements of 16 bytes
        thread, chunks = compiler_barrier(cute.arch.thread_idx()[0] % WARPGROUP), c.dim // width
        vectors = copies.fragments(64 * chunks // WARPGROUP, width, c.dtype)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            row = cutlass.max(cutlass.min(w.warpgroup * 64 + i // chunks, tile.rows - 1), 0)
            token, head = tile.token_and_head(row)
            token = cutlass.min(token, tile.seq.tokens - 1)
            copies.load(ins.q[tile.batch, token, head, None].iterator + i % chunks * width, vector)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            row = sQ[w.warpgroup * 64 + i // chunks, None, 0]
            cute.autovec_copy(vector, cute.local_tile(row, (width,), (i % chunks,)))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(NamedBarrier.Q_STORED) + w.warpgroup, number_of_threads=WARPGROUP)


# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor).
_REGISTERS = {
    "one producer warp": {(1, 1): (56, 256), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160)},
    # Addresses of rows of pages, or the transposition of V.
    "busy producer": {(1, 1): (56, 256), (1, 2): (40, 216), (2, 1): (40, 232)},
    "widening producer": {(1, 1): (96, 256), (1, 2): (56, 200), (2, 1): (56, 224)},
    # The producer's warpgroup has a scheduler, and may transpose V beside it.
    "dynamic": {(2, 1): (40, 232), (3, 1): (32, 160)},
    "stream-K": {(1, 1): (96, 256), (1, 2): (48, 208)},
    "stream-K, convert": {(1, 1): (96, 256), (1, 2): (56, 200)},
}


class GroupScheduler(Scheduler):
    """What the schedulers of tiles that a KV head's query heads share have alike."""

    def __init__(self, config: Config, collective: Collective, role: str):
        super().__init__(config, collective.mainloop, _REGISTERS[role][config.consumers, config.per_sm])
        self.of, self.layouts = collective, collective.loader.layouts

    def launch_shape(self, scalars: GroupScalars) -> dict[str, Any]:
        block = [WARPGROUP + self.c.threads, 1, 1]
        return {"block": block, "min_blocks_per_mp": self.c.per_sm, "preferred_smem_carveout": 100}

    def launch(self, ins: Any, scalars: GroupScalars, workspace: Any, layouts: Layouts) -> tuple:
        mmas, ctas = self.mainloop.mmas(), self.grid(ins, scalars, workspace)
        return self.of.loader.loads(ins, layouts), workspace, mmas, ctas

    def prefetch(self, loads: Any) -> None:
        self.of.loader.prefetch(loads)

    @cute.jit
    def each_tile(self, ins: Any, run: cutlass.Constexpr):
        """``run(info, n, fills)`` for each tile that is told, of which one lane says that it is read."""
        fills, n = Int32(0), Int32(0)
        while self.tiles.wait(n) >= 0:
            info = self._read(ins, n)
            self.tiles.release(n)
            run(info, n, fills)
            fills += info.tile.stop - info.tile.first
            n += 1


class DynamicLoads(NamedTuple):
    kv: KVLoads
    q: QLoads


class DynamicPersistent(GroupScheduler):
    """Persistent CTAs that take work tiles from a counter, for batches with many rows.

        scheduler warp  --takes a work tile and finds its rows-->  work tile info, which all others read
        loading warps   --K and V of one work tile after another-->  rings  -->  2 or 3 consumer warpgroups
        one more warp   --rows of Q of the next-->  ring

    The next tile's prologue overlaps the current tile: barriers, the search for its sequence, its first keys and its
    rows. With ragged lengths static assignment cannot balance, so CTAs add to a counter in device memory, one tile
    ahead, and more of short ones. Who takes a launch's last leaves the counter at zero.
    """

    def __init__(self, config: Config, collective: Collective):
        super().__init__(config, collective, "dynamic")
        self.boxes = RowBoxes(config)
        assert config.loader_warps <= _QUERIES, config

    def launch(self, ins: Any, scalars: GroupScalars, workspace: TileCounter, layouts: Layouts) -> tuple:
        ctas, mmas = cutlass.min(workspace.ctas, self.of.sequences.max_tiles(ins)), self.mainloop.mmas()
        queries = self.boxes.source(ins.q)
        return DynamicLoads(self.of.loader.loads(ins, layouts), self.boxes.loads(*queries)), workspace, mmas, ctas

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts, work: TileCounter) -> SharedMemory:
        c = self.c
        consumers = 4 * c.consumers
        table = (
            ("q", c.q_stages, 1, consumers),
            ("k", c.stages, 1, consumers),
            ("v", c.stages, 1, consumers),
            ("tiles", _TILES, 1, consumers + c.loader_warps + 1),
        )
        found = rings(memory, warp, table)
        stages = Stages(found["q"], found["k"], found["v"], *self.mainloop.operands(memory, layouts))
        sInfo = memory.allocate_tensor(Int32, cute.make_layout((TILE_INFO, _TILES)), 16)
        self.tiles = TileInfoRing(found["tiles"], sInfo)
        return SharedMemory(stages)

    def prefetch(self, loads: DynamicLoads) -> None:
        super().prefetch(loads.kv)
        cpasync.prefetch_descriptor(loads.q.atom)

    @cute.jit
    def produce(self, args: Arguments, loads: DynamicLoads, smem: SharedMemory, warp: Int32, first: None):
        if warp < self.c.loader_warps:
            self.load_keys(args.ins, loads, smem)
        elif warp == _QUERIES:
            self.load_queries(loads, smem)
        elif warp == _SCHEDULER:
            self.schedule(args)

    @cute.jit
    def schedule(self, args: Arguments):
        """One warp: a work tile when there is room for its info, -1 behind the last."""
        ins, _, scalars, work = args
        counter, ctas = work.count.iterator.toint(), cute.arch.grid_dim()[0]
        slots = self.of.sequences.max_tiles(ins)  # of tiles, times KV heads; some may be empty
        rules = MaskRules.of(scalars)
        n, index = Int32(0), cute.arch.block_idx()[0]
        while index < slots:
            tile, kv_index, valid = self.of.sequences.nth_tile(ins, rules, work.section, index)
            if valid:
                rows = cutlass.min(tile.rows, self.c.tile_rows)
                info = TileInfo(tile._replace(rows=rows), kv_index, Int32(0), Int32(1), Int32(0), Int32(0))
                self.tiles.write(n, info.values())
                if (tile.stop > _SHORT) & (n > 0):
                    # Wait until the one before is begun: other CTAs may be free before this one.
                    self.tiles.ring.await_empty(n - 1 + _TILES)
                n += 1
            index = self._next(counter, ctas)
        self.tiles.write(n, [Int32(-1)])
        if (index == slots + ctas - 1) & (cute.arch.lane_idx() == 0):
            atomics.store_relaxed(counter, Int32(0))  # no CTA takes any more

    @cute.jit
    def _next(self, counter: Any, ctas: Int32):
        """The next slot and KV head, for a whole warp; each CTA has had one without."""
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = op.add_acq_rel(counter, Int32(1))
        return ctas + cute.arch.shuffle_sync(taken, 0)

    @cute.jit
    def load_keys(self, ins: Any, loads: DynamicLoads, smem: SharedMemory):
        """Every warp that loads keys."""
        produce = self.of.loader.produce
        self.each_tile(ins, lambda info, n, fills: produce(loads.kv, ins, info.tile, info.kv_index, smem, fills))

    @cute.jit
    def load_queries(self, loads: DynamicLoads, smem: SharedMemory):
        """One warp: the rows of each work tile. Behind a sequence's last are others', which nobody stores."""
        n, sBoxes = Int32(0), self.boxes.stages(smem.stages.sQ)
        while self.tiles.wait(n) >= 0:
            tile = self._read(None, n).tile
            self.tiles.release(n)
            full = self.boxes.acquire(smem.stages.ring_q, n)
            rows = self.of.sequences.queries_from(loads.q.q, tile)
            self.boxes.load(loads.q, rows, sBoxes, smem.stages.ring_q.slot(n), full)
            n += 1

    @cute.jit
    def consume(self, args: Arguments, smem: SharedMemory, mmas: tuple, first: None):
        """One warpgroup: 64 rows of one work tile after another."""
        ins, outs, scalars, _ = args
        w = self.of.consumer(scalars, smem, mmas)
        self.mainloop.begin_ping_pong(w)
        n, fills = Int32(0), Int32(0)
        while self.tiles.wait(n) >= 0:
            tile = self._read(ins, n).tile
            smem.stages.ring_q.wait(n)
            sums = self.of.attend_loaded(w, scalars, tile, n, fills)
            info = self._read(ins, n)  # again: registers are scarce between
            tile = info.tile
            rows, results = self.of.sequences.rows(ins, outs, tile, info.kv_index)
            store(self.c, w, rows, results, tile, sums)
            fills += tile.stop - tile.first
            self.tiles.release(n)
            n += 1

    def _read(self, ins: Any, n: Int32) -> TileInfo:
        return TileInfo.of(self.tiles.read(n), fixed_group(self.c))
