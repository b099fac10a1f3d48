"""``paged_multi.py`` over E4M3: blocks of queries of any length over a cache of bytes in pages on Hopper.

Where rows and keys lie is ``PagedMulti``'s, what is done with them ``MultiCodes``'s: one warp loads boxes of pages, K's
swizzled as products read them and V's as they come, and the others of its warpgroup turn V around.

Tile letters: M rows, N keys.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring

from .multi import grid_of
from .multi_blocks import MaskRules, WorkTile
from .multi_codes import MultiCodes, SharedMemory
from .multi_types import Layouts, Outputs, Scalars
from .page_loads import Boxes, Loads
from .paged_blocks import rows_from, slots, work_tile
from .paged_codes_types import Config, Inputs, Rows


class Values(Fixed):
    """V in boxes of keys with all columns, as it comes: (N, Dv) bytes."""

    def __init__(self, config: Config):
        self.c = config

    def atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """For a cache (Np, Ps, Hkv, Dv), and its tensor of coordinates (Ps, Dv, Hkv, Np)."""
        c = self.c
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else cpasync.CopyBulkTensorTileG2SOp()
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        box = cute.make_ordered_layout((c.box, c.dim_v), order=(1, 0))
        return cpasync.make_tiled_tma_atom(copy, rows, box, (c.box, c.dim_v))

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, tile: WorkTile, places: Int32, block: Int32, n: Int32
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring over stage (N, Dv, stages); lane l of places has the l-th box's page."""
        c, (atom, rows) = self.c, source
        full = ring.acquire(n, c.tile_n * c.dim_v)
        each, first = const_expr(c.boxes // c.ctas), Int32(0)
        if const_expr(c.pair):
            first = cute.arch.block_in_cluster_idx()[0] * each
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        for i in cutlass.range(each, unroll=1):
            box = first + i
            row = (block * c.tile_n + box * c.box) % c.page // c.box
            page = cute.arch.shuffle_sync(places, box)
            gBox = cute.local_tile(rows[None, None, tile.kv_head, page], (c.box, c.dim_v), (row, 0))  # (box, Dv)
            sBox = cute.local_tile(stage[None, None, ring.slot(n)], (c.box, c.dim_v), (box, 0))
            to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
            cute.copy(atom, source_of, to, tma_bar_ptr=full, **mask)


class PagedMultiCodes:
    """The kernel: one work tile a CTA, a producer that turns V around, and the consumers of ``Multi``."""

    def __init__(self, config: Config):
        self.c, self.codes = config, MultiCodes(config)
        self.multi, self.mainloop = self.codes.multi, self.codes.mainloop
        self.keys, self.values = Boxes(config), Values(config)
        self.regs_load, self.regs_mma = self.codes.regs_load, self.codes.regs_mma
        self.span = config.tile_m * (2 if config.pair else 1)  # rows of a cluster

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        as_numbers = ins._replace(k=self.codes.numbers(ins.k), v=self.codes.numbers(ins.v))
        keys = self.keys.key_atom(as_numbers.k)
        return Loads(*keys, *self.values.atom(as_numbers.v))

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream: Any):
        c, layouts = self.c, self.codes.layouts()
        qk_mma, pv_mma = self.mainloop.mmas()
        heads = Int32(ins.k.shape[2])
        group = Int32(ins.q.shape[1]) // heads
        tiles = slots(Int32(ins.q.shape[0]), group, Int32(ins.cu_q.shape[0]), self.span) * heads
        self.kernel(self.loads(ins, layouts), ins, outs, scalars, layouts, qk_mma, pv_mma).launch(
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
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.codes.shared_memory(cutlass.memory.SmemAllocator(), warp, layouts)
        tile, sequence, there = self._work_tile(ins, scalars)
        if warp == 0:
            self.keys.prefetch(loads)
        cute.arch.mbarrier_init_fence()
        self._await_barriers()
        if there:
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.regs_load)
                if warp == 0:
                    self.produce(loads, ins, tile, sequence, smem, Int32(0))
                else:
                    self.codes.turn(scalars, tile, smem, Int32(0))
                self.multi._idle_through_combine(scalars)
            else:
                cute.arch.setmaxregister_increase(self.regs_mma)
                rows, results = self.rows(ins, outs, tile, sequence)
                w = self.multi.consumer(scalars, smem, qk_mma, pv_mma)
                self.mainloop.begin_turns(w)
                here, sums = self.codes.attend(w, rows, scalars, tile, smem, Int32(0))
                self.multi.finish(here, sums, rows, results, scalars, tile, smem)

    def _work_tile(self, ins: Inputs, scalars: Scalars) -> tuple:
        rules = MaskRules(scalars.causal, scalars.window, scalars.sink_tokens)
        return work_tile(self.c, ins, scalars, rules, self.span)

    def _await_barriers(self) -> None:
        """Neither CTA of a pair may write to the other before its barriers stand."""
        if self.c.pair:
            self.multi._sync_cluster()
        else:
            cute.arch.sync_threads()

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile, sequence: Int32) -> tuple[Rows, Outputs]:
        """A tile's sequence as a dense batch of one. What lies behind the last has that one's scales."""
        q0 = tile.seq.q0
        known = cutlass.min(sequence, Int32(ins.kv_len.shape[0]) - 1)
        scales = tuple(cute.domain_offset((known, 0), scale) for scale in ins.scales)
        return Rows(rows_from(ins.q, q0), ins.sink, scales), Outputs(*(rows_from(t, q0) for t in outs))

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """One warp: the blocks of K and of V as it is, pages looked up a block ahead; ``fills`` of every ring were
        before."""
        c, stages, keys = self.c, smem.stages, self.keys
        k, v = (loads.k_atom, loads.k), (loads.v_atom, loads.v)
        places = keys.places(ins, tile, sequence, tile.block(tile.first))
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n, block = fills + step - tile.first, tile.block(step)
            following = keys.places(ins, tile, sequence, tile.block(step + 1))
            keys.load(k, stages.ring_k, stages.sK, c.dim, tile, places, block, n)
            self.values.load(v, smem.values.ring, smem.values.stages, tile, places, block, n)
            places = following
