"""The mainloop for heads of 512: 64 queries by two consumer warpgroups, which split Dv.

    consumer 0: S = Q K' -> softmax -> P in registers, and in shared memory -> O += P V, the first half of Dv
    consumer 1:             wait for P and the factors of O                 -> O += P V, the second half

An output of 64 x 512 elements fills the registers of two warpgroups. Only consumer 0 computes S; it hands P and the
factors of O to consumer 1 through a 2-stage buffer (``Exchange``), guarded by named barriers of both warpgroups. The
next block's scores and both halves of this block's output are on their way together, and the next softmax is computed
under the second product. docs/lab/prefill.md has what limits it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda.ring import Fixed, rings
from torch_attnkit.cuda.sm90 import softmax

from ..types import Inputs, Outputs
from .config import WARPGROUP, Config, OutputRows
from .epilogue import Epilogue
from .mainloop import Consumer, Mainloop, Stages
from .mask import Mask

_ROWS = 64
_CONSUMERS = 2
_MESSAGES = 2  # under way


class ExchangeBarrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's, that of both consumers is ``mainloop.NamedBarrier``'s."""

    FULL = 1  # + message % 2: the second consumer may read it
    EMPTY = 3  # + message % 2: the first consumer may write the next but one


@dataclass
class Exchange(Fixed):
    """Messages of the first consumer to the second: a block's P, and what the output before it is multiplied by.

    A work tile's last message are the factors of its result, without a P.
    """

    sP: cute.Tensor  # (M, N, messages)
    sFactor: cute.Tensor  # (M, messages), Float32


@dataclass
class SplitConsumer(Consumer):
    """With P in shared memory. Its number is that of its half of the output; rO is (mma, M, Dv / 2), tOrV (mma, Dv / 2,
    N, stages * 2)."""

    exchange: Exchange
    shared_mma: cute.TiledMma  # P in shared memory
    tOrP: cute.Tensor  # (mma, M, N, messages)
    message: cute.Tensor  # (1), Int32: the number of the next one, from the kernel's start


class MainloopHdim512(Mainloop):
    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The two products of the first consumer: of Q and K, both in shared memory, and of P in registers and V."""
        return self._mma(self.c.tile_n, OperandMajorMode.K), self._mma(
            self.half, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        )

    def _mma(self, columns: int, major: Any, *source: Any) -> cute.TiledMma:
        """Of one warpgroup."""
        dtype = self.c.dtype
        return hopper.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (_ROWS, columns), *source
        )

    def rings(self, memory, warp: Int32, sizes: cutlass.Constexpr):
        """The rings of Q, K and V, which warp 0 initialises. Of K only the first consumer reads."""
        table = [
            (name, stages, 1, 4 * consumers * (2 if pair else 1))
            for name, consumers, (stages, pair) in zip("qkv", (_CONSUMERS, 1, _CONSUMERS), sizes, strict=True)
        ]
        made = rings(memory, warp, table)
        for name, (_, pair) in zip("qkv", sizes, strict=True):
            made[name].pair = pair
        return [made[name] for name in "qkv"]

    def operands(self, memory, layouts) -> list[cute.Tensor]:
        """sQ, sK and sV of ``Stages``, and beside them the messages."""
        c = self.c
        found = super().operands(memory, layouts)
        layout = self.layout((_ROWS, c.tile_n, _MESSAGES))
        sP = memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner)
        sFactor = memory.allocate_tensor(Float32, cute.make_layout((_ROWS, _MESSAGES)), 16)
        self.exchange = Exchange(sP, sFactor)
        return found

    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> SplitConsumer:
        """The consumer that ``thread`` of both consumers' belongs to."""
        c = self.c
        group, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), cute.arch.lane_idx()
        # Blocks of 64 columns lie one after another, so half a stage is one of twice as many.
        halves = self.layout((c.tile_n, self.half, c.stages * _CONSUMERS)).outer
        by_column = cute.make_ordered_layout((self.half, c.tile_n, c.stages * _CONSUMERS), order=(1, 0, 2))
        sVt = cute.composition(cute.make_tensor(stages.sV.iterator, halves), by_column)  # (Dv / 2, N, stages * 2)
        shared_mma = self._mma(self.half, OperandMajorMode.MN)
        index = thread % WARPGROUP
        qk, pv, shared = (mma.get_slice(index) for mma in (qk_mma, pv_mma, shared_mma))
        rP = pv.make_fragment_A(pv.partition_shape_A((_ROWS, c.tile_n)))
        message = cute.make_rmem_tensor(1, Int32)
        message[0] = Int32(0)
        row = index // 32 * 16 + lane // 4
        operands = [qk.make_fragment_A(qk.partition_A(stages.sQ)), qk.make_fragment_B(qk.partition_B(stages.sK))]
        tOrP = shared.make_fragment_A(shared.partition_A(self.exchange.sP))
        operands += [pv.make_fragment_B(pv.partition_B(sVt)), rP, cute.recast_tensor(rP, Int32)]
        rO = cute.make_rmem_tensor(pv.partition_shape_C((_ROWS, self.half)), Float32)
        common = group, row, lane, stages, qk_mma, pv_mma, *operands, rO
        statistics = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        return SplitConsumer(*common, *statistics, scalars, self.exchange, shared_mma, tOrP, message)

    @property
    def half(self) -> int:
        """Columns of the output that a consumer has."""
        return self.c.dim_v // _CONSUMERS

    @cute.jit
    def begin_ping_pong(self, w: SplitConsumer):
        """All messages may be written."""
        if w.warpgroup == 1:
            for i in cutlass.range_constexpr(_MESSAGES):
                cute.arch.barrier_arrive(barrier_id=int(ExchangeBarrier.EMPTY) + i, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def first_block(self, w: SplitConsumer, mask: Mask, fill: Int32, n: Int32, block: Int32):
        w.rO.fill(0.0)
        if w.warpgroup == 0:
            self._first_scores(w, mask, fill, n, block)
            self._send(w)
        if const_expr(self.c.padded):
            self._clear_rows(w, mask, n, block)

    @cute.jit
    def next_block(self, w: SplitConsumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: cutlass.Constexpr):
        if w.warpgroup == 0:
            self._next_scores(w, mask, fill, n, block, edge)
            self._send(w)
        else:
            self._receive(w, n - 1)
        if const_expr(self.c.padded and edge != ""):
            self._clear_rows(w, mask, n, block)

    @cute.jit
    def last_product(self, w: SplitConsumer, n: Int32):
        if w.warpgroup == 0:
            super().last_product(w, n)
        else:
            self._receive(w, n)

    def _scores(self, w: SplitConsumer, fill: Int32, n: Int32) -> list[cute.Tensor]:
        """Issue the scores of a block, a sum for each half of D: shorter chains of products, whose roundings are
        coarser than those of an addition."""
        rQ = w.tSrQ[None, None, None, w.stages.ring_q.slot(fill)]
        rK = w.tSrK[None, None, None, w.stages.ring_k.slot(n)]
        steps, sums = cute.size(rQ, mode=[2]) // 2, []
        for half in range(2):
            rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((_ROWS, self.c.tile_n)), Float32)
            self._multiply(w.qk_mma, rS, rQ, rK, clear=True, steps=range(half * steps, (half + 1) * steps))
            sums.append(rS)
        return sums

    def _sum(self, sums: list[cute.Tensor]) -> cute.Tensor:
        for i in range(cute.size(sums[0])):
            sums[0][i] = sums[0][i] + sums[1][i]
        return sums[0]

    def _issue_pv(self, w: SplitConsumer, n: Int32) -> cute.Tensor:
        """The first half's product, with P from registers."""
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n) * _CONSUMERS]
        self._multiply(w.pv_mma, w.rO, w.rP, rV, clear=False)
        return w.rO

    @cute.jit
    def _send(self, w: SplitConsumer):
        """P and the factors of the output before it."""
        slot = self.await_message(w, ExchangeBarrier.EMPTY)
        pair = cute.make_rmem_tensor(2, self.c.dtype)
        word = cute.recast_tensor(pair, Int32)
        for j in cutlass.range_constexpr(cute.size(w.rP_pairs)):
            word[0] = w.rP_pairs[j]
            row = w.exchange.sP[w.row + 8 * (j % 2), None, slot]
            cute.autovec_copy(pair, cute.local_tile(row, (2,), (j // 2 * 4 + w.lane % 4,)))
        self.store_factors(w, slot, w.scales)
        cute.arch.fence_view_async_shared()
        self.pass_message(w, ExchangeBarrier.FULL)

    @cute.jit
    def _receive(self, w: SplitConsumer, n: Int32):
        """The second half's product of block n."""
        slot = self.await_message(w, ExchangeBarrier.FULL)
        softmax.rescale(w.rO, self.factors(w, slot))
        w.stages.ring_v.wait(n)
        rP = w.tOrP[None, None, None, slot]
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n) * _CONSUMERS + 1]
        self._multiply(w.shared_mma, w.rO, rP, rV, clear=False)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n)
        self.pass_message(w, ExchangeBarrier.EMPTY)

    def await_message(self, w: SplitConsumer, state: ExchangeBarrier) -> Int32:
        """Wait until the next message is in a state; returns its slot."""
        slot = w.message[0] % _MESSAGES
        cute.arch.barrier(barrier_id=int(state) + slot, number_of_threads=2 * WARPGROUP)
        return slot

    def pass_message(self, w: SplitConsumer, state: ExchangeBarrier) -> None:
        """Say that it is in the other state."""
        slot = w.message[0] % _MESSAGES
        cute.arch.barrier_arrive(barrier_id=int(state) + slot, number_of_threads=2 * WARPGROUP)
        w.message[0] = w.message[0] + 1

    @cute.jit
    def store_factors(self, w: SplitConsumer, slot: Int32, factors):
        if w.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                w.exchange.sFactor[w.row + 8 * r, slot] = factors[r]

    def factors(self, w: SplitConsumer, slot: Int32) -> list[Float32]:
        return [w.exchange.sFactor[w.row + 8 * r, slot] for r in range(2)]


class EpilogueHdim512(Epilogue):
    """Row sums and LSE by the first consumer, both halves of the output from registers."""

    def __init__(self, config: Config, mainloop: MainloopHdim512):
        super().__init__(config, mainloop)
        self.columns = mainloop.half

    @cute.jit
    def store(self, w: SplitConsumer, ins: Inputs, outs: Outputs, at: OutputRows):
        """Divide by the row sums and write out, 16 bytes of out per lane."""
        c = self.c
        if w.warpgroup == 0:
            self._finish(w, ins, outs, at)
        if const_expr(c.normalize):
            self._exchange_factors(w)
            softmax.rescale(w.rO, w.scales)
        self.store_rows(w, outs, at, w.warpgroup * self.columns)

    @cute.jit
    def _finish(self, w: SplitConsumer, ins: Inputs, outs: Outputs, at: OutputRows):
        """LSE and row sums, and into ``scales`` the factors of the result."""
        for r in cutlass.range_constexpr(2):
            row_sum = softmax.quad_sum(w.row_sum[r])
            lse, w.scales[r] = self.row_result(w, ins, at.head, r, row_sum)
            self.store_stats(w, outs, at, r, lse, row_sum)

    @cute.jit
    def _exchange_factors(self, w: SplitConsumer):
        """The tile's last message."""
        loop = self.mainloop
        if w.warpgroup == 0:
            slot = loop.await_message(w, ExchangeBarrier.EMPTY)
            loop.store_factors(w, slot, w.scales)
            loop.pass_message(w, ExchangeBarrier.FULL)
        else:
            slot = loop.await_message(w, ExchangeBarrier.FULL)
            w.scales[0], w.scales[1] = loop.factors(w, slot)
            # Nothing else up to the arrival needs them, which must not overtake these loads (``inspect.overtaken``).
            cute.arch.fence_view_async_shared()
            loop.pass_message(w, ExchangeBarrier.EMPTY)
