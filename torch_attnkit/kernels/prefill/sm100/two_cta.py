"""A tile of 128 rows with heads of 512 on Blackwell by a pair of CTAs: products of the pair, P in shared memory.

An output of 128 x 512 numbers would fill tensor memory and leave no room for scores. So two CTAs share a tile, 64 rows
each, by products of a pair (``cta_group::2``, M 128), which use all 128 lanes of either CTA: rows in lanes 0-63 for a
product's first columns and in lanes 64-127 for its last ones (PTX ISA, "Data Path Layout Organization", layout B). The
output takes half of tensor memory, two buffers of scores a quarter. Each CTA loads half of every block for both: of K
half the keys, of V half the columns. Probabilities pass through shared memory: in tensor memory each half of the lanes
would need the other's too. Loads, softmax and correction run in both CTAs, the products are issued by the first.

Products are issued as S(0) | S(1) O(0) | S(2) O(1) | ...; S is the sum over pieces of the head dim, four in 16 bits and
two in E4M3, O two products of 256 columns.

In bf16 a pair does 128 operations for each byte that it reads, half of what ``one_cta.py`` does with its tiles of 256
rows. So two pairs may form a cluster on neighbouring tiles (``c.pair``), where each CTA loads half of its half for both
pairs by TMA multicast. The kernel that has these parts is ``prefill.py``.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import tmem

from ..key_blocks import KeyBlocks
from . import two_cta_rows
from .epilogue import Epilogue
from .mma import multiply, release
from .prefill import Parts
from .scheduler import Scheduler
from .types import (
    CTAS,
    HALF,
    LANES,
    ROWS,
    Heads,
    Layouts,
    Loads,
    Mmas,
    Rings,
    SharedMemory,
    TwoCta,
    WorkTile,
    score_buffer,
)


def parts(config: TwoCta, scheduler: Scheduler) -> Parts:
    rows = two_cta_rows.TwoCtaRows(config)
    correction = two_cta_rows.TwoCtaCorrection(config, scheduler, Epilogue(config, rows))
    return Parts(ring_table, TwoCtaLoad(config), TwoCtaMma(config), two_cta_rows.TwoCtaBlock(config), rows, correction)


def ring_table(c: TwoCta) -> tuple:
    """Name, stages, and how many arrivals complete a phase of the full and of the empty barriers.

    The full barriers of ``k`` and ``q`` in the first CTA count what both load; so do the empty ones of ``scores``: P is
    there, V is loaded and cleared, the output is rescaled, in both. V's are each CTA's own.
    """
    first = 1 - cute.arch.block_idx()[0] % CTAS  # 1 in the first CTA, whose issuing warp reads notes as well
    return (
        ("tile", 2, 1, 8 + first),
        ("k", c.stages, 1, c.ctas),
        ("v", c.stages, 1, c.ctas),
        ("q", 1, 1, 1),
        ("scores", 2, 1, 16),
        ("factors", c.ahead, 4, 1),
        ("output", 1, 1, 1),
    )


class TwoCtaLoad(Fixed):
    """What the loading warps bring for a work tile."""

    def __init__(self, config: TwoCta):
        self.c = config

    def multicast(self) -> dict:
        """Loads to the CTAs of this rank in both pairs."""
        return {"mcast_mask": cutlass.Int16(5 << cute.arch.block_idx()[0] % CTAS)} if self.c.pair else {}

    @cute.jit
    def _expect(self, full: cute.Pointer, nbytes: cutlass.Constexpr, rank: Int32) -> None:
        """Announce bytes that each CTA loads, on the first one's barrier."""
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, CTAS * nbytes)

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
        """In each CTA its half of the queries and of all pieces of K and V."""
        c, rings = self.c, smem.rings
        rank = cute.arch.block_idx()[0] % CTAS
        pair = cute.arch.block_idx()[0] // CTAS % c.ctas
        qk, pv = mmas.qk.get_slice(rank), mmas.pv.get_slice(rank)
        gQ = qk.partition_A(cute.local_tile(heads.q, (ROWS, c.piece), (tile.row * c.ctas + pair, None)))
        gK = qk.partition_B(cute.local_tile(heads.k, (c.tile_n, c.piece), (None, None)))
        gV = pv.partition_B(cute.local_tile(heads.v, (HALF, c.part), (None, None)))
        tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, smem.sQ, gQ, 3)  # (box, pieces) both
        # (box, stages), (box, blocks, pieces); (box, stages), (box, halves of Dv, parts)
        tKsK, tKgK = copies.tma_partition(loads.k_atom, pair, c.ctas, smem.sK, gK, 3)
        tVsV, tVgV = copies.tma_partition(loads.v_atom, pair, c.ctas, smem.sV, gV, 3)
        full = rings.q.await_empty(fills)
        self._expect(full, c.nbytes(LANES, c.dim), rank)
        for part in cutlass.range_constexpr(c.k_pieces):
            cute.copy(loads.q_atom, tQgQ[None, part], tQsQ[None, part], tma_bar_ptr=full)
        for i in cutlass.range(0, visit.steps + 1, unroll=1):
            if i < visit.steps:
                for part in cutlass.range(0, c.k_pieces, unroll=1):
                    k = (n + i) * c.k_pieces + part
                    full = rings.k.await_empty(k)
                    self._expect(full, self.c.nbytes(c.tile_n // CTAS, c.piece), rank)
                    source = tKgK[None, visit.block(i), part]
                    cute.copy(loads.k_atom, source, tKsK[None, rings.k.slot(k)], tma_bar_ptr=full, **mask)
            if i > 0:
                for part in cutlass.range(0, c.v_pieces, unroll=1):
                    k = (n + i - 1) * c.v_pieces + part
                    full = rings.v.acquire(k, self.c.nbytes(c.part, HALF // CTAS))
                    source = tVgV[None, part // c.parts, visit.block(i - 1) * c.parts + part % c.parts]
                    cute.copy(loads.v_atom, source, tVsV[None, rings.v.slot(k)], tma_bar_ptr=full, **mask)


@dataclass
class TwoCtaFragments(Fixed):
    """What the products read: descriptors of shared memory; and the layouts of what they write to tensor memory."""

    tQ: cute.Tensor  # (mma, M, piece, pieces)
    tK: cute.Tensor  # (mma, N, piece, stages)
    tV: cute.Tensor  # (mma, HALF, part, stages)
    tP: cute.Tensor  # (mma, M, part, parts)
    scores: Any  # (mma, M, N)
    output: Any  # (mma, M, HALF)


class TwoCtaMma(Fixed):
    """What the issuing warp does for a work tile."""

    def __init__(self, config: TwoCta):
        self.c = config

    def fragments(self, mmas: Mmas, layouts: Layouts, smem: SharedMemory) -> TwoCtaFragments:
        qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
        scores = qk.make_fragment_C(mmas.qk.partition_shape_C((ROWS, self.c.tile_n))).layout
        output = pv.make_fragment_C(mmas.pv.partition_shape_C((ROWS, HALF))).layout
        tQ, tK = qk.make_fragment_A(smem.sQ), qk.make_fragment_B(smem.sK)
        tP, tV = pv.make_fragment_A(smem.sP), pv.make_fragment_B(smem.sV)
        return TwoCtaFragments(tQ, tK, tV, tP, scores, output)

    @cute.jit
    def multiply_tile(self, mmas: Mmas, f: TwoCtaFragments, rings: Rings, visit: KeyBlocks, fill: Int32, n: Int32):
        rings.q.wait(fill)
        self._scores(mmas.qk, f, rings, n)
        for i in cutlass.range(1, visit.steps + 1, unroll=1):
            if i < visit.steps:
                self._scores(mmas.qk, f, rings, n + i)
            else:
                self._commit(rings.q.empty)
            self._output(mmas.pv, f, rings, n + i - 1, i > 1)

    def _commit(self, barrier: cute.Pointer) -> None:
        """Arrive in both CTAs of this pair, once the products so far are done."""
        pair = cute.arch.block_idx()[0] // CTAS % self.c.ctas
        with cute.arch.elect_one():
            tcgen05.commit(barrier, cutlass.Int16(3 << CTAS * pair), self.c.cta_group)

    @cute.jit
    def _scores(self, mma: cute.TiledMma, f: TwoCtaFragments, rings: Rings, n: Int32):
        """Block n's scores into their buffer, piece by piece of the head dim."""
        c = self.c
        tQ, tK = f.tQ, f.tK
        buffer, _ = score_buffer(c, 0, n)
        tS = cute.make_tensor(tmem.pointer(Float32, buffer * (c.tile_n // 2) + c.scores[0]), f.scores)
        for part in cutlass.range(0, c.k_pieces, unroll=1):
            k = n * c.k_pieces + part
            rings.k.wait(k)
            at = rings.k.slot(k)
            multiply(mma, tS, tQ[None, None, None, part], tK[None, None, None, at], accumulate=part > 0)
            release(c, rings.k, at)
        self._commit(rings.scores.full + buffer)

    @cute.jit
    def _output(self, mma: cute.TiledMma, f: TwoCtaFragments, rings: Rings, n: Int32, more: cutlass.Boolean):
        """Block n's part of the output, once probabilities and V are there and the output is rescaled in both CTAs."""
        c = self.c
        tP, tV = f.tP, f.tV
        buffer, phase = score_buffer(c, 0, n)
        cute.arch.mbarrier_wait(rings.scores.empty + buffer, phase)
        tmem.after_sync()
        for h in cutlass.range_constexpr(c.halves):
            tO = cute.make_tensor(tmem.pointer(Float32, c.outputs[0] + h * HALF // 2), f.output)
            for keys in cutlass.range_constexpr(c.parts):
                at = rings.v.slot(n * c.v_pieces + c.parts * h + keys)
                accumulate = more if keys == 0 else True
                multiply(mma, tO, tP[None, None, None, keys], tV[None, None, None, at], accumulate=accumulate)
                release(c, rings.v, at)
        self._commit(rings.output.full)
