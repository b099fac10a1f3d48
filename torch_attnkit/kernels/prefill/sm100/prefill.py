"""The Blackwell prefill kernel: the launch, how a CTA begins and ends, and which warps have which role.

    loads --Q, K, V--> shared memory          products: S = Q K' and O (+)= P V, one warp, both in tensor memory
    softmax, a warpgroup a tile: S -> P       correction, one warpgroup: O *= factor when a maximum moved; O -> out

What a tile is and how it is computed is a part that the kernel has: ``one_cta.py``, or ``two_cta.py`` for D 512. The
scheduler, the loading warp, the softmax role and the epilogue are the same for both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as blackwell

from torch_attnkit.cuda.ring import rings
from torch_attnkit.cuda.sm100 import tmem

from ..key_blocks import TileScheduler
from ..types import Inputs, Outputs, Scalars
from .load import Load
from .rows import Softmax
from .scheduler import Scheduler
from .types import ROWS, STATES, Config, Layouts, Loads, Mmas, Rings, SharedMemory, WorkTile

# Registers per thread of the softmax (with two tiles, two), correction, and issuing warpgroups, by the number of tiles.
# More than a launch has, 168 for each of 384 threads or 128 for each of 512, would be waited for without end.
_REGISTERS = {1: (248, 144, 112), 2: (208, 56, 40)}
_WIDENING = {1: _REGISTERS[1], 2: (200, 56, 56)}  # beside warps that widen K and V


@dataclass
class Parts:
    """How one CTA or two compute a tile."""

    ring_table: Callable[[Config], tuple]  # for ``rings``: lines named as the fields of Rings
    copies: Any  # brings a tile's operands
    products: Any  # issues a tile's products
    block: Any  # turns a block's scores into probabilities
    rows: Any  # which thread has which row
    correction: Any  # rescales and stores the outputs


class Prefill:
    def __init__(self, config: Config, parts: Callable[[Config, Scheduler], Parts]):
        self.c, self.scheduler = config, Scheduler(config)
        part = parts(config, self.scheduler)
        self.ring_table, self.products, self.correction = part.ring_table, part.products, part.correction
        self.load = Load(config, self.scheduler, part.copies)
        self.softmax = Softmax(config, self.scheduler, part.rows, part.block)
        self.widen: Any = None  # of E4M3 beside queries of 16 bits: ``widen.WidenKV``

    @cute.jit
    def __call__(self, ins: Inputs, outs: Outputs, scalars: Scalars, stream):
        c = self.c
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        tiler_qk, tiler_pv = c.tilers
        qk = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, c.cta_group, tiler_qk[:2])
        pv = blackwell.make_trivial_tiled_mma(c.dtype, c.dtype, K, MN, Float32, c.cta_group, tiler_pv[:2], c.p_source)
        layouts = Layouts(
            blackwell.make_smem_layout_a(qk, tiler_qk, c.dtype, c.depths.q),
            blackwell.make_smem_layout_b(qk, tiler_qk, c.dtype, c.depths.k),
            blackwell.make_smem_layout_b(pv, tiler_pv, c.dtype, c.depths.v),
            blackwell.make_smem_layout_a(pv, tiler_pv, c.dtype, c.depths.p),
        )
        mmas = Mmas(qk, pv)
        ins = ins._replace(**{n: self._typed(getattr(ins, n)) for n in "qkv"})
        tiles, loads = self.scheduler.tiles(ins, outs, scalars), self.load.atoms(ins, layouts, mmas)
        self.kernel(loads, ins, outs, scalars, tiles, layouts, mmas).launch(
            grid=[c.cluster * self._clusters(tiles, scalars), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _clusters(self, tiles: TileScheduler, scalars: Scalars) -> Int32:
        if const_expr(not self.c.persistent):
            return tiles.num_tiles()
        return cutlass.min(scalars.sms // self.c.cluster, tiles.num_tiles())

    def _typed(self, t: cute.Tensor) -> cute.Tensor:
        """E4M3, which comes as bytes."""
        return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.c.dtype), t.layout) if self.c.codes else t

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        tiles: TileScheduler,
        layouts: Layouts,
        mmas: Mmas,
    ):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self._shared_memory(cutlass.memory.SmemAllocator(), warp, layouts)
        two = c.cta_group is tcgen05.CtaGroup.TWO
        if warp == c.mma_warp:
            cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(smem.tmem_base, dtype=Int32), is_two_cta=two)
        if warp == c.load_warp:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        self._sync_cluster()
        tmem.after_sync()
        soft, correct, issue = (_WIDENING if c.fp8_kv else _REGISTERS)[c.tiles]
        if warp < c.correction_warp:
            cute.arch.setmaxregister_increase(soft)
            self.softmax.run(ins, scalars, smem, warp)
        elif warp < c.mma_warp:
            self._registers(correct)
            self.correction.run(ins, outs, scalars, smem, warp)
        else:
            cute.arch.setmaxregister_decrease(issue)
            if warp == c.load_warp:
                self.load.run(loads, ins, outs, scalars, tiles, mmas, smem)
            if self._issues(warp):
                self.multiply(scalars, mmas, layouts, smem)
            if const_expr(c.fp8_kv):
                if warp > c.load_warp:
                    self.widen.run(scalars, smem, warp - c.load_warp - 1)
        self._sync_cluster()  # no CTA may leave while the others' products and copies still use its memory
        if warp == c.mma_warp:
            tmem.after_sync()
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS, is_two_cta=two)

    def _shared_memory(self, memory, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        named = rings(memory, warp, self.ring_table(c))
        operands = [
            memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner)
            for layout in (layouts if c.p_in_smem else layouts[:3])
        ]
        staged = self.widen.stages(memory) if c.fp8_kv else {}
        floats = lambda *shape: memory.allocate_tensor(Float32, cute.make_layout(shape), 16)
        return SharedMemory(
            Rings(**named),
            *(operands if c.p_in_smem else (*operands, None)),
            sTile=memory.allocate_tensor(Int32, cute.make_layout((len(WorkTile._fields), 2)), 16),
            sFactors=floats(ROWS, c.ahead * c.tiles),
            sMaxima=floats(ROWS, 2) if c.p_in_smem else None,
            sFinals=floats(ROWS, STATES, 2 * c.tiles),
            tmem_base=memory.allocate(4, 4),
            **staged,
        )

    def _issues(self, warp: Int32) -> Boolean:
        """Whether this warp issues products: of two CTAs the first one's, for both."""
        issues = warp == self.c.mma_warp
        if const_expr(self.c.cta_group is tcgen05.CtaGroup.TWO):
            issues = issues & (cute.arch.block_idx()[0] % 2 == 0)
        return issues

    def _sync_cluster(self) -> None:
        """All threads of the CTA, or of the cluster."""
        if const_expr(self.c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _registers(self, count: int) -> None:
        """Up or down from what the launch gave, 64 K among all threads."""
        if const_expr(count > 65536 // self.c.threads):
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    @cute.jit
    def multiply(self, scalars: Scalars, mmas: Mmas, layouts: Layouts, smem: SharedMemory):
        """One warp: issues the products of all tiles, in the order that the part's file shows at its top."""
        fragments = self.products.fragments(mmas, layouts, smem)
        fill, n = Int32(0), Int32(0)
        tile = self.scheduler.read(smem.rings.tile, smem.sTile, fill)
        while tile.row >= 0:
            visit = self.scheduler.key_blocks(tile, scalars)
            self.products.multiply_tile(mmas, fragments, smem.rings, visit, fill, n)
            n += visit.steps
            fill += 1
            tile = self.scheduler.read(smem.rings.tile, smem.sTile, fill)
