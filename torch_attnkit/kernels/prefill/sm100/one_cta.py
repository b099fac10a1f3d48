"""A tile of many queries on Blackwell by one CTA: ``tcgen05`` products, scores and probabilities in tensor memory.

Tensor memory holds two buffers of scores, which the probabilities take over in place, and the outputs, so nothing but K
and V moves while a tile runs, and any number of keys is one launch. A CTA has two tiles of 128 rows in flight: the
tensor cores work on one while the other's softmax runs; at head dim 256, where tensor memory holds one output, one tile
whose blocks alternate between the buffers of scores. The heads of a group that divides 128 are packed into a tile's
rows, which read the keys that they share once. Two CTAs may form a ``pair`` on neighbouring tiles: each loads half of
every block for both by TMA multicast, so that the L2 is read half as often. Products are issued in this order, so that
the commit of a block's scores also says that the output of the block before is whole:

    S0(0) S1(0) | O0(0) S0(1) | O1(0) S1(1) | O0(1) S0(2) | ...        one tile: S(0) | S(1) O(0) | S(2) O(1) | ...

The kernel that has these parts is ``prefill.py``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import tmem

from ..key_blocks import KeyBlocks
from . import one_cta_rows
from .epilogue import Epilogue
from .mma import multiply, release
from .prefill import Parts
from .scheduler import Scheduler
from .types import ROWS, Heads, Layouts, Loads, Mmas, OneCta, Rings, SharedMemory, WorkTile, score_buffer


def parts(config: OneCta, scheduler: Scheduler) -> Parts:
    rows = one_cta_rows.OneCtaRows(config)
    correction = one_cta_rows.OneCtaCorrection(config, scheduler, Epilogue(config, rows))
    return Parts(ring_table, OneCtaLoad(config), OneCtaMma(config), one_cta_rows.OneCtaBlock(config), rows, correction)


def ring_table(c: OneCta) -> tuple:
    """Name, stages, and how many arrivals complete a phase of the full and of the empty barriers."""
    warps = 4 * c.tiles + 4  # that have rows
    staged = (("staged_k", c.staged, 1, c.widen_warps), ("staged_v", c.staged, 1, c.widen_warps))
    return (
        ("tile", 2, 1, warps + 1 + c.widen_warps),
        ("k", c.stages, c.widen_warps or 1, c.ctas),
        ("v", c.stages, c.widen_warps or 1, c.ctas),
        ("q", c.tiles, 1, 1),  # a stage a tile
        ("scores", 2, 1, 8),
        ("factors", c.ahead * c.tiles, 4, 1),
        ("output", c.tiles, 1, 1),
        *(staged if c.fp8_kv else ()),
    )


class OneCtaLoad(Fixed):
    """What the loading warp brings for a work tile."""

    def __init__(self, config: OneCta):
        self.c = config

    def multicast(self) -> dict:
        """Loads to both CTAs of a pair."""
        return {"mcast_mask": cutlass.Int16(3)} if self.c.pair else {}

    @cute.jit
    def load_tile(
        self,
        loads: Loads,
        heads: Heads,
        mmas: Mmas,
        smem: SharedMemory,
        mask: dict,
        tile: WorkTile,
        visit: KeyBlocks,
        fills: Int32,
        n: Int32,
    ):
        """The queries of the CTA's tiles, and K and V of the blocks; ``fills`` and ``n`` count what came before."""
        c, rings = self.c, smem.rings
        rank = cute.arch.block_idx()[0] % c.ctas
        qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
        gK = qk.partition_B(cute.local_tile(heads.k, (c.tile_n, c.dim), (None, 0)))
        gV = pv.partition_B(cute.local_tile(heads.v, (c.dim_v, c.tile_n), (0, None)))
        tKsK, tKgK = copies.tma_partition(loads.k_atom, rank, c.ctas, smem.sK, gK, 3)  # (box, stages), (box, blocks)
        tVsV, tVgV = copies.tma_partition(loads.v_atom, rank, c.ctas, smem.sV, gV, 3)
        for t in cutlass.range_constexpr(c.tiles):
            gQ = qk.partition_A(cute.local_tile(heads.q, (ROWS, c.dim), (None, 0)))
            tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, smem.sQ, gQ, 3)
            cute.arch.mbarrier_wait(rings.q.empty + t, (fills & 1) ^ 1)
            full = rings.q.full + t
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.nbytes(ROWS, c.dim))
            q_row = (tile.row * c.ctas + rank) * c.tiles + t
            cute.copy(loads.q_atom, tQgQ[None, q_row], tQsQ[None, t], tma_bar_ptr=full)
            if const_expr(t == 0):
                full = rings.k.acquire(n, c.nbytes(c.tile_n, c.dim))
                block = visit.block(Int32(0))
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, rings.k.slot(n)], tma_bar_ptr=full, **mask)
        for i in cutlass.range(1, visit.steps + 1, unroll=1):
            if i < visit.steps:
                full = rings.k.acquire(n + i, self.c.nbytes(c.tile_n, c.dim))
                block = visit.block(i)
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, rings.k.slot(n + i)], tma_bar_ptr=full, **mask)
            full = rings.v.acquire(n + i - 1, self.c.nbytes(c.tile_n, c.dim_v))
            block = visit.block(i - 1)
            cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, rings.v.slot(n + i - 1)], tma_bar_ptr=full, **mask)


@dataclass
class OneCtaFragments(Fixed):
    """What the products read and write: descriptors of shared memory, and addresses in tensor memory."""

    tQ: cute.Tensor  # (mma, M, D, tiles)
    tK: cute.Tensor  # (mma, N, D, stages)
    tV: cute.Tensor  # (mma, Dv, N, stages)
    tS: list[cute.Tensor]  # of each buffer of scores (mma, M, N)
    tO: list[cute.Tensor]  # of each tile (mma, M, Dv)
    tP: list[cute.Tensor]  # of each buffer of scores (mma, M, N), in the operands' dtype


class OneCtaMma(Fixed):
    """What the issuing warp does for the tiles of a work tile."""

    def __init__(self, config: OneCta):
        self.c = config

    def fragments(self, mmas: Mmas, layouts: Layouts, smem: SharedMemory) -> OneCtaFragments:
        c = self.c
        qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
        tQ, tK, tV = qk.make_fragment_A(smem.sQ), qk.make_fragment_B(smem.sK), pv.make_fragment_B(smem.sV)
        shape_s = qk.make_fragment_C(mmas.qk.partition_shape_C((ROWS, c.tile_n))).layout
        shape_o = pv.make_fragment_C(mmas.pv.partition_shape_C((ROWS, c.dim_v))).layout
        tS = [cute.make_tensor(tmem.pointer(Float32, column), shape_s) for column in c.scores]
        tO = [cute.make_tensor(tmem.pointer(Float32, column), shape_o) for column in c.outputs]
        # A fragment starts at column 0 whatever its tensor does, and counts in elements of P.
        p = pv.make_fragment_A(cute.make_tensor(tmem.pointer(c.dtype, 0), layouts.p.outer))[None, None, None, 0]
        tP = [cute.make_tensor(p.iterator + column * 32 // c.dtype.width, p.layout) for column in c.scores]
        return OneCtaFragments(tQ, tK, tV, tS, tO, tP)

    @cute.jit
    def multiply_tile(self, mmas: Mmas, f: OneCtaFragments, rings: Rings, visit: KeyBlocks, fill: Int32, n: Int32):
        c = self.c
        tQ, tK, tV = f.tQ, f.tK, f.tV
        for t in cutlass.range_constexpr(c.tiles):
            cute.arch.mbarrier_wait(rings.q.full + t, fill & 1)
        rings.k.wait(n)
        k_block = tK[None, None, None, rings.k.slot(n)]
        for t in cutlass.range_constexpr(c.tiles):
            self._scores(mmas.qk, f.tS, tQ[None, None, None, t], k_block, rings, t, n)
        release(c, rings.k, rings.k.slot(n))
        for i in cutlass.range(1, visit.steps + 1, unroll=1):
            more = i < visit.steps
            v_slot = rings.v.slot(n + i - 1)
            k_slot = rings.k.slot(n + i)
            if const_expr(c.tiles == 1):
                if more:
                    rings.k.wait(n + i)
                    k_block = tK[None, None, None, k_slot]
                    self._scores(mmas.qk, f.tS, tQ[None, None, None, 0], k_block, rings, 0, n + i)
                    release(c, rings.k, k_slot)
                else:
                    self._commit(rings.q.empty)
                rings.v.wait(n + i - 1)
                self._output(mmas.pv, f.tO[0], f.tP, tV[None, None, None, v_slot], rings, 0, n + i - 1, i > 1)
                self._commit(rings.output.full)
            else:
                rings.v.wait(n + i - 1)
                if more:
                    rings.k.wait(n + i)
                else:
                    for t in cutlass.range_constexpr(c.tiles):
                        self._commit(rings.q.empty + t)
                v_block, k_block = tV[None, None, None, v_slot], tK[None, None, None, k_slot]
                for t in cutlass.range_constexpr(c.tiles):
                    self._output(mmas.pv, f.tO[t], f.tP, v_block, rings, t, n + i - 1, i > 1)
                    if more:
                        self._scores(mmas.qk, f.tS, tQ[None, None, None, t], k_block, rings, t, n + i)
                    else:
                        self._commit(rings.output.full + t)
                if more:
                    release(c, rings.k, k_slot)
            release(c, rings.v, v_slot)

    def _commit(self, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            tcgen05.commit(barrier)

    @cute.jit
    def _scores(self, mma: cute.TiledMma, tS, q_tile, k_block, rings: Rings, t: cutlass.Constexpr, n: Int32):
        """Block n's scores of tile t into its buffer."""
        if const_expr(self.c.tiles == 2):
            multiply(mma, tS[t], q_tile, k_block, accumulate=False)
            self._commit(rings.scores.full + t)
        elif n % 2 == 0:
            multiply(mma, tS[0], q_tile, k_block, accumulate=False)
            self._commit(rings.scores.full)
        else:
            multiply(mma, tS[1], q_tile, k_block, accumulate=False)
            self._commit(rings.scores.full + 1)

    @cute.jit
    def _output(
        self, mma: cute.TiledMma, tO, tP, v_block, rings: Rings, t: cutlass.Constexpr, n: Int32, more: cutlass.Boolean
    ):
        """Block n's part of tile t's output, once its probabilities are there and the output is rescaled."""
        buffer, phase = score_buffer(self.c, t, n)
        cute.arch.mbarrier_wait(rings.scores.empty + buffer, phase)
        tmem.after_sync()
        if const_expr(self.c.tiles == 2):
            multiply(mma, tO, tP[t], v_block, accumulate=more)
        elif n % 2 == 0:
            multiply(mma, tO, tP[0], v_block, accumulate=more)
        else:
            multiply(mma, tO, tP[1], v_block, accumulate=more)
