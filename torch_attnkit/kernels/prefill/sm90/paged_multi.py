"""Softmax attention of blocks of queries of any length over a cache in pages on Hopper.

    producer  --K and V, a ring each, from pages-->  shared memory  -->  1 or 2 consumer warpgroups, 64 rows each

The consumers, and the clusters and pairs that they form, are ``multi.py``'s: the rows of a tile are all query heads of
a KV head for as many queries as fit, so that a single token reads its keys once, and a long prompt fills tiles. What is
different is where a tile's rows are, which a CTA finds by the offsets (``paged_blocks.py``), and where its keys are
(``page_loads.py``). A CTA has one work tile: how long a sequence is only the device knows, and the order in which CTAs
begin evens out what they have to do.

Tile letters: M rows, N keys.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Ring, rings

from .mainloop import Mainloop, Stages
from .multi import Multi, Once, SharedMemory, grid_of
from .multi_blocks import MaskRules, WorkTile
from .multi_types import Layouts, Outputs, Scalars
from .page_loads import Boxes, CopiedRing, CopiedRows, Loads
from .paged_blocks import all_slots, rows_from, work_tile
from .paged_types import Config, Inputs, Rows

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor), where
# threads copy rows: addresses need more than TMA.
_REGISTERS_OF_ROWS = {(1, 1): (56, 256), (1, 2): (40, 216), (2, 1): (40, 232)}


class PagedMulti:
    """The kernel: one work tile a CTA, a producer, and the consumers of ``Multi``."""

    def __init__(self, config: Config):
        self.c, self.mainloop, self.multi = config, Mainloop(config), Multi(config)
        self.keys = Boxes(config) if config.box else CopiedRows(config)
        self.regs_load, self.regs_mma = self.multi.regs_load, self.multi.regs_mma
        if not config.box:
            self.regs_load, self.regs_mma = _REGISTERS_OF_ROWS[config.consumers, config.per_sm]
        self.span = config.tile_m * (2 if config.pair else 1)  # rows of a cluster

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream: Any):
        c, layouts = self.c, self.multi.layouts()
        qk_mma, pv_mma = self.mainloop.mmas()
        tiles = all_slots(c, ins, self.span)
        self.kernel(self.keys.loads(ins), ins, outs, scalars, layouts, qk_mma, pv_mma).launch(
            stream=stream, **grid_of(c, tiles, scalars.ctas)
        )

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
        smem = self.shared_memory(cutlass.memory.SmemAllocator(), warp, layouts)
        if warp == 0:
            self.keys.prefetch(loads)
        rules = MaskRules(scalars.causal, scalars.window, scalars.sink_tokens)
        tile, sequence, there = work_tile(c, ins, scalars, rules, self.span)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.pair):
            self.multi._sync_cluster()  # neither CTA may write to the other before its barriers stand
        else:
            cute.arch.sync_threads()
        if there:
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.regs_load)
                if warp < c.loader_warps:
                    self.produce(loads, ins, tile, sequence, smem, Int32(0))
                self.multi._idle_through_combine(scalars)
            else:
                cute.arch.setmaxregister_increase(self.regs_mma)
                rows, results = self.rows(ins, outs, tile)
                self.multi.consume(rows, results, scalars, tile, smem, qk_mma, pv_mma)

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile) -> tuple[Rows, Outputs]:
        """A tile's sequence as a dense batch of one."""
        q0 = tile.seq.q0
        return Rows(rows_from(ins.q, q0), ins.sink), Outputs(*(rows_from(t, q0) for t in outs))

    def shared_memory(self, memory, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        arrivals = 4 * c.consumers * (2 if c.pair else 1)
        full = 1 if c.box else 32 * c.loader_warps
        found = rings(memory, warp, (("k", c.stages, full, arrivals), ("v", c.stages, full, arrivals)))
        kind = Ring if c.box else CopiedRing
        both = (kind(r.full, r.empty, c.stages, c.pair) for r in found.values())
        return SharedMemory(Stages(Once(), *both, *self.mainloop.operands(memory, layouts)))

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """Every warp that loads: the blocks of K and of V, V one behind K, pages looked up a block ahead; ``fills`` of
        either ring were before."""
        c, stages, keys = self.c, smem.stages, self.keys
        k, v = (loads.k_atom, loads.k), (loads.v_atom, loads.v)
        places = keys.places(ins, tile, sequence, tile.block(tile.first))
        before = places
        for step in cutlass.range(tile.first, tile.stop + 1, unroll=1):
            n = fills + step - tile.first
            following = keys.places(ins, tile, sequence, tile.block(step + 1))
            if step < tile.stop:
                keys.load(k, stages.ring_k, stages.sK, c.dim, tile, places, tile.block(step), n)
            if step > tile.first:
                keys.load(v, stages.ring_v, stages.sV, c.dim_v, tile, before, tile.block(step - 1), n - 1)
            before, places = places, following
