"""``multi.py`` over E4M3: blocks of queries over a cache on Hopper, both products by FP8 ``wgmma``.

    producer's warp 0       --K, and V as it is, a ring each, by TMA-->  shared memory
    producer's other warps  --V turned around (turned_values.py), a ring-->  shared memory
    1 or 2 consumer warpgroups of 64 rows, with the mainloop of codes.py

Rows of a tile, clusters, pairs and the sum over a cluster are ``Multi``'s. The cache crosses memory once, half as many
bytes as of 16 bits. Scales are numbers of a work tile: q's and k's go into that of its scores, v's into its output.

Tile letters: M rows, N keys.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Ring, rings
from torch_attnkit.cuda.sm90 import softmax

from . import multi, scales
from .codes import Mainloop
from .mainloop import Consumer, Stages
from .multi import Multi, Once, grid_of
from .multi_blocks import WorkTile
from .multi_codes_types import TURNING_WARPS, Config, Inputs, Place
from .multi_types import Layouts, Loads, Outputs, Scalars
from .turned_values import TurnedValues, staged_layout

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor): more
# for the producer than in ``multi.py``, whose warps but one are idle.
_REGISTERS = {(1, 1): (56, 256), (1, 2): (40, 216), (2, 1): (40, 232)}


@dataclass
class SharedMemory(multi.SharedMemory):
    """With V as it comes behind K and V turned around."""

    values: TurnedValues


class MultiCodes:
    """The kernel: one work tile a CTA, a producer that turns V around, and the consumers of ``Multi``."""

    def __init__(self, config: Config):
        self.c, self.multi = config, Multi(config)
        self.mainloop = self.multi.mainloop = Mainloop(config)
        self.regs_load, self.regs_mma = _REGISTERS[config.consumers, config.per_sm]
        self.prefetch = self.multi.prefetch

    def numbers(self, t: cute.Tensor) -> cute.Tensor:
        """E4M3 that came as bytes."""
        return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.c.dtype), t.layout)

    def layouts(self) -> Layouts:
        c = self.c
        shapes = (c.tile_m, c.dim, 1), (c.tile_n, c.dim, c.stages), (c.dim_v, c.tile_n, c.turned)
        return Layouts(*(self.mainloop.layout(shape) for shape in shapes))

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        keys_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))
        atoms = []
        for tensor, layout in ((ins.k, layouts.k), (ins.v, staged_layout(self.c))):
            atoms += copies.tma_atom(keys_first(self.numbers(tensor)), layout, 2 if self.c.pair else 1)
        return Loads(*atoms)

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream: Any):
        layouts = self.layouts()
        qk_mma, pv_mma = self.mainloop.mmas()
        tiles = self.multi._row_tiles(ins) * Int32(ins.k.shape[1]) * Int32(ins.q.shape[0])
        self.kernel(self.loads(ins, layouts), ins, outs, scalars, layouts, qk_mma, pv_mma).launch(
            stream=stream, **grid_of(self.c, tiles, scalars.ctas)
        )

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        sides, consumers = 2 if c.pair else 1, 4 * c.consumers
        table = (
            ("k", c.stages, 1, consumers * sides),
            ("staged", c.stages, 1, TURNING_WARPS * sides),
            ("v", c.turned, TURNING_WARPS, consumers),
        )
        found = rings(memory, warp, table)
        k, staged = (Ring(found[name].full, found[name].empty, c.stages, c.pair) for name in ("k", "staged"))
        stages = Stages(Once(), k, found["v"], *self.mainloop.operands(memory, layouts))
        return SharedMemory(stages, TurnedValues(c, memory, staged))

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
            self.prefetch(loads)
        tile = self.multi._work_tile(ins, scalars)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.pair):
            self.multi._sync_cluster()  # neither CTA may write to the other before its barriers stand
        else:
            cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp == 0:
                self.produce(loads, tile, smem, Int32(0))
            else:
                self.turn(scalars, tile, smem, Int32(0))
            self.multi._idle_through_combine(scalars)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            w = self.multi.consumer(scalars, smem, qk_mma, pv_mma)
            self.mainloop.begin_turns(w)
            here, sums = self.attend(w, ins, scalars, tile, smem, Int32(0))
            self.multi.finish(here, sums, ins, outs, scalars, tile, smem)

    def turn(self, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32) -> None:
        """The other warps of the producer's warpgroup."""
        smem.values.turn(smem.stages.ring_v, smem.stages.sV, tile, scalars, fills)

    @cute.jit
    def produce(self, loads: Loads, tile: WorkTile, smem: SharedMemory, fills: Int32):
        """One warp: the blocks of K and of V as it is; ``fills`` of every ring were before."""
        c, ring_k, ring_v = self.c, smem.stages.ring_k, smem.values.ring
        ctas = const_expr(2 if c.pair else 1)
        rank = cute.arch.block_in_cluster_idx()[0] if c.pair else Int32(0)
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        k_head, v_head = (t[None, None, tile.kv_head, tile.batch] for t in (loads.k, loads.v))
        gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
        gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
        tKsK, tKgK = copies.tma_partition(loads.k_atom, rank, ctas, smem.stages.sK, gK)  # (box, stages), (box, blocks)
        tVsV, tVgV = copies.tma_partition(loads.v_atom, rank, ctas, smem.values.stages, gV)
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n, block = fills + step - tile.first, tile.block(step)
            full = ring_k.acquire(n, self.multi.bytes_k)
            cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
            full = ring_v.acquire(n, self.multi.bytes_v)
            cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n)], tma_bar_ptr=full, **mask)

    def attend(
        self, w: Consumer, ins: Inputs, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> tuple[Consumer, list[Float32]]:
        """``Multi.attend`` with the scales of the work tile, which the consumer that is returned has as well."""
        c, at = self.c, Place(tile.batch, tile.kv_head * tile.group)
        here = dataclasses.replace(w, scalars=scales.scaled(c, ins, scalars, at))
        sums = self.multi.attend(here, ins._replace(q=self.numbers(ins.q)), scalars, tile, smem, fills)
        lowered = Float32(2.0**-c.lift)
        factor = scales.factor(c, ins, at, scales.V) * lowered
        softmax.rescale(here.rO, [factor, factor])
        return here, [x * lowered for x in sums]
