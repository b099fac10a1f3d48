"""Softmax attention with heads of 512 on Blackwell: a pair of CTAs computes a tile of 128 rows.

An output of 128 x 512 numbers would fill tensor memory and leave no room for scores. So two CTAs share a tile, 64 rows
each, by products of a pair (``cta_group::2``, M 128), which use all 128 lanes of either CTA: rows in lanes 0-63 for a
product's first columns and in lanes 64-127 for its last ones (PTX ISA, "Data Path Layout Organization", layout B). The
output takes half of tensor memory, two buffers of scores a quarter. Each CTA loads half of every block for both: of K
half the keys, of V half the columns. Probabilities pass through shared memory: in tensor memory each half of the lanes
would need the other's too.

    loads, a warp in both CTAs: Q, pieces of K, pieces of V          products, one warp: S = Q K', then O (+)= P V
    softmax, a warpgroup in both: S -> P in shared memory            correction, a warpgroup in both: O *= factor -> out

Products are issued as S(0) | S(1) O(0) | S(2) O(1) | ...; S is the sum over pieces of the head dim, four in 16 bits and
two in E4M3, O two products of 256 columns. The persistent grid of pairs, and how its roles walk through tiles, is
``prefill_frame.py``.

In bf16 a pair does 128 operations for each byte that it reads, half of what ``prefill.py`` does with its tiles of 256
rows. So two pairs may form a cluster on neighbouring tiles (``c.pair``), where each CTA loads half of its half for both
pairs by TMA multicast. For 1152 tokens and 2 heads the simulator then counts 26 MB of copies instead of 45.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..prefill_tiles import Blocks, Order
from ..prefill_types import Scalars
from ..ring import rings
from . import tmem
from .prefill_frame import Frame
from .prefill_types import ROWS, Layouts, Loads, Products
from .prefill_wide_rows import WideRows
from .prefill_wide_types import CTAS, HALF, LANES


class WidePrefill(WideRows, Frame):
    def _clusters(self, order: Order, scalars: Scalars) -> Int32:
        """Pairs are persistent. How many clusters of four a chip holds at a time is not known: each has one turn."""
        return order.size() if self.c.pair else super()._clusters(order, scalars)

    def _beside(self, memory, factors: cute.Tensor, staged: list) -> tuple:
        """Also the threads' maxima, of two blocks, and the probabilities."""
        peaks = memory.allocate_tensor(Float32, cute.make_layout((ROWS, 2)), 16)
        return factors, peaks, staged[3]

    def _issues(self, warp: Int32) -> Boolean:
        """In the first CTA of a pair, for both."""
        return (warp == self.c.product_warp) & (cute.arch.block_idx()[0] % CTAS == 0)

    @cute.jit
    def _barriers(self, memory, warp: Int32):
        """Rings of notes and of pieces of K and V, and pairs of single mbarriers: see the fields' names."""
        c = self.c
        first = 1 - cute.arch.block_idx()[0] % CTAS  # 1 in the first CTA, whose product warp reads notes as well
        table = (
            ("notes", 2, 1, 8 + first),
            ("k", c.stages, 1, c.ctas),  # full: of the first CTA alone, for both
            ("v", c.stages, 1, c.ctas),
            ("q", 1, 1, 1),  # full: of the first CTA alone, for both
            ("scores", 2, 1, 16),  # full: S is whole; empty, of the first CTA alone: P is, V is there, O is rescaled
            ("factors", c.turns, 4, 1),  # full: the softmax group has left its factors or finals; empty unused
            ("output", 1, 1, 1),  # full: a block's products are done; empty unused
        )
        return rings(memory, warp, table)

    @cute.jit
    def _expect(self, full: cute.Pointer, nbytes: cutlass.Constexpr, rank: Int32) -> None:
        """Announce bytes that each CTA loads, on the first one's barrier."""
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, CTAS * nbytes)

    def _multicast(self) -> dict:
        """Loads to the CTAs of this rank in both pairs."""
        return {"mcast_mask": cutlass.Int16(5 << cute.arch.block_idx()[0] % CTAS)} if self.c.pair else {}

    @cute.jit
    def _load_tile(self, loads: Loads, heads, products: Products, bars, staged, mask, walk):
        """In each CTA its half of the queries and of all pieces of K and V."""
        c = self.c
        tile, plan, fills, n = walk
        # Of products of k numbers: ((64, k), 1, piece / k, k_pieces), ((64, k), 1, piece / k, stages),
        # ((128, k), 1, part / k, stages); P is ((64, k), 1, part / k, parts).
        sQ, sK, sV, _ = staged
        q_head, k_head, v_head = heads
        rank = cute.arch.block_idx()[0] % CTAS
        pair = cute.arch.block_idx()[0] // CTAS % c.ctas
        qk, pv = products.qk.get_slice(rank), products.pv.get_slice(rank)
        gQ = qk.partition_A(cute.local_tile(q_head, (ROWS, c.piece), (tile.row * c.ctas + pair, None)))
        gK = qk.partition_B(cute.local_tile(k_head, (c.tile_n, c.piece), (None, None)))
        gV = pv.partition_B(cute.local_tile(v_head, (HALF, c.part), (None, None)))
        tQsQ, tQgQ = self._split(loads.q_atom, 0, 1, sQ, gQ)  # (box, pieces) both
        tKsK, tKgK = self._split(loads.k_atom, pair, c.ctas, sK, gK)  # (box, stages), (box, blocks, pieces)
        tVsV, tVgV = self._split(loads.v_atom, pair, c.ctas, sV, gV)  # ..., (box, halves of Dv, parts)
        full = bars["q"].await_empty(fills)
        self._expect(full, self._bytes(LANES, c.dim), rank)
        for part in cutlass.range_constexpr(c.k_pieces):
            cute.copy(loads.q_atom, tQgQ[None, part], tQsQ[None, part], tma_bar_ptr=full)
        for i in cutlass.range(0, plan.steps + 1, unroll=1):
            if i < plan.steps:
                for part in cutlass.range(0, c.k_pieces, unroll=1):
                    k = (n + i) * c.k_pieces + part
                    full = bars["k"].await_empty(k)
                    self._expect(full, self._bytes(c.tile_n // CTAS, c.piece), rank)
                    source = tKgK[None, plan.block(i), part]
                    cute.copy(loads.k_atom, source, tKsK[None, bars["k"].slot(k)], tma_bar_ptr=full, **mask)
            if i > 0:
                for part in cutlass.range(0, c.v_pieces, unroll=1):
                    k = (n + i - 1) * c.v_pieces + part
                    full = bars["v"].acquire(k, self._bytes(c.part, HALF // CTAS))
                    source = tVgV[None, part // c.parts, plan.block(i - 1) * c.parts + part % c.parts]
                    cute.copy(loads.v_atom, source, tVsV[None, bars["v"].slot(k)], tma_bar_ptr=full, **mask)

    def _operands(self, products: Products, layouts: Layouts, staged):
        """Of both products: fragments of what they read, and the layout of their result."""
        sQ, sK, sV, sP = staged
        qk, pv = products.qk.get_slice(0), products.pv.get_slice(0)
        shape_s = qk.make_fragment_C(products.qk.partition_shape_C((ROWS, self.c.tile_n))).layout
        shape_o = pv.make_fragment_C(products.pv.partition_shape_C((ROWS, HALF))).layout
        queries = (products.qk, qk.make_fragment_A(sQ), qk.make_fragment_B(sK))
        values = (products.pv, pv.make_fragment_A(sP), pv.make_fragment_B(sV))
        return (queries, shape_s), (values, shape_o)

    @cute.jit
    def _multiply_tile(self, products: Products, operands, bars, plan: Blocks, turn: Int32, n: Int32):
        (queries, shape_s), (values, shape_o) = operands
        bars["q"].wait(turn)
        self._scores(queries, shape_s, bars, n)
        for i in cutlass.range(1, plan.steps + 1, unroll=1):
            if i < plan.steps:
                self._scores(queries, shape_s, bars, n + i)
            else:
                self._commit(bars["q"].empty)
            self._output(values, shape_o, bars, n + i - 1, i > 1)

    def _commit(self, barrier: cute.Pointer) -> None:
        """Arrive in both CTAs of this pair, once the products so far are done."""
        pair = cute.arch.block_idx()[0] // CTAS % self.c.ctas
        with cute.arch.elect_one():
            tcgen05.commit(barrier, cutlass.Int16(3 << CTAS * pair), self.c.cta_group)

    @cute.jit
    def _scores(self, queries, shape, bars, n: Int32):
        """Block n's scores into their buffer, piece by piece of the head dim."""
        c = self.c
        mma, tQ, tK = queries
        slot, _ = self.buffer(0, n)
        tS = cute.make_tensor(tmem.pointer(Float32, slot * (c.tile_n // 2) + c.scores[0]), shape)
        for part in cutlass.range(0, c.k_pieces, unroll=1):
            k = n * c.k_pieces + part
            bars["k"].wait(k)
            at = bars["k"].slot(k)
            self._product(mma, tS, tQ[None, None, None, part], tK[None, None, None, at], accumulate=part > 0)
            self._release(bars["k"], at)
        self._commit(bars["scores"].full + slot)

    @cute.jit
    def _output(self, values, shape, bars, n: Int32, more: cutlass.Boolean):
        """Block n's part of the output, once probabilities and V are there and the output is rescaled in both CTAs."""
        c = self.c
        mma, tP, tV = values
        slot, phase = self.buffer(0, n)
        cute.arch.mbarrier_wait(bars["scores"].empty + slot, phase)
        tmem.after_sync()
        for h in cutlass.range_constexpr(c.halves):
            tO = cute.make_tensor(tmem.pointer(Float32, c.outputs[0] + h * HALF // 2), shape)
            for keys in cutlass.range_constexpr(c.parts):
                at = bars["v"].slot(n * c.v_pieces + c.parts * h + keys)
                accumulate = more if keys == 0 else True
                self._product(mma, tO, tP[None, None, None, keys], tV[None, None, None, at], accumulate=accumulate)
                self._release(bars["v"], at)
        self._commit(bars["output"].full)
