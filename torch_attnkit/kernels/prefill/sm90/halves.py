"""The mainloop and the epilogue of ``prefill.py`` for wide heads on Hopper: 64 queries by two consumer warpgroups.

    consumer 0: S = Q K' -> softmax -> P in registers, and in shared memory -> O += P V, the first half of Dv
    consumer 1:             wait for P and the factors of O                 -> O += P V, the second half

An output of 64 x 512 numbers fills the registers of two warpgroups. Only one has scores: what it finds, it leaves for
the other as a message, of which two may be under way (``Exchange``). The next block's scores and both halves of this
block's output are on their way together, and the next softmax is computed under the second product.
docs/lab/prefill.md has what limits it.
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

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, rings
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import exp2

from ..types import Inputs, Outputs
from . import mainloop, types
from .mainloop import WARPGROUP, Mask, Stages

_ROWS = 64
_CONSUMERS = 2
_MESSAGES = 2  # under way


class Barrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's, where both consumers meet is ``mainloop.Barrier``'s."""

    FULL = 1  # + message % 2: the second consumer may read it
    EMPTY = 3  # + message % 2: the first consumer may write the next but one


@dataclass(frozen=True, kw_only=True)
class Config(types.Config):
    """What is fixed at compile time."""

    @property
    def consumers(self) -> int:
        return _CONSUMERS

    @property
    def half(self) -> int:
        """Columns of the output that a consumer has."""
        return self.dim_v // _CONSUMERS


@dataclass
class Exchange(Fixed):
    """Messages of the first consumer to the second: a block's P, and what the output before it is multiplied by.

    A work tile's last message are the factors of its result, without a P.
    """

    sP: cute.Tensor  # (M, N, messages)
    sFactor: cute.Tensor  # (M, messages), Float32


@dataclass
class Consumer(Fixed):
    """What one consumer warpgroup works on: its slices of the operands, its accumulators, its row statistics."""

    number: Int32  # of the consumer, and of its half of the output
    row: Int32  # this lane's first row of the tile; the other is 8 below
    lane: Int32
    stages: Stages
    exchange: Exchange
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma  # P in registers
    shared_mma: cute.TiledMma  # P in shared memory
    tSrQ: cute.Tensor  # (mma, M, D, q_stages), descriptors of shared memory
    tSrK: cute.Tensor  # (mma, N, D, stages)
    tOrP: cute.Tensor  # (mma, M, N, messages)
    tOrV: cute.Tensor  # (mma, Dv / 2, N, stages * 2)
    rP: cute.Tensor  # (mma, M, N), in the operands' dtype
    rP_pairs: cute.Tensor  # the same as pairs, Int32
    rO: cute.Tensor  # (mma, M, Dv / 2), float32
    row_max: cute.Tensor  # (2), of this lane's rows; unscaled
    row_sum: cute.Tensor  # (2), this lane's part
    scales: cute.Tensor  # (2), what the output so far is still to be multiplied by
    message: cute.Tensor  # (1), Int32: the number of the next one, from the kernel's start
    scalars: Any  # with scale_log2 and cap_slope


class Mainloop(Fixed):
    """In the place of ``mainloop.Mainloop``."""

    def __init__(self, config: Config):
        self.c, self.common = config, mainloop.Mainloop(config)
        self.layout = self.common.layout

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The two products of the first consumer: of Q and K, both in shared memory, and of P in registers and V."""
        return self._mma(self.c.tile_n, OperandMajorMode.K), self._mma(
            self.c.half, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
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
        found = self.common.operands(memory, layouts)
        layout = self.layout((_ROWS, c.tile_n, _MESSAGES))
        sP = memory.allocate_tensor(c.dtype, layout.outer, 1024, swizzle=layout.inner)
        sFactor = memory.allocate_tensor(Float32, cute.make_layout((_ROWS, _MESSAGES)), 16)
        self.exchange = Exchange(sP, sFactor)
        return found

    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> Consumer:
        """The consumer that ``thread`` of both consumers' belongs to."""
        c = self.c
        number, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), cute.arch.lane_idx()
        # Blocks of 64 columns lie one after another, so half a stage is one of twice as many.
        halves = self.layout((c.tile_n, c.half, c.stages * _CONSUMERS)).outer
        by_column = cute.make_ordered_layout((c.half, c.tile_n, c.stages * _CONSUMERS), order=(1, 0, 2))
        sVt = cute.composition(cute.make_tensor(stages.sV.iterator, halves), by_column)  # (Dv / 2, N, stages * 2)
        shared_mma = self._mma(c.half, OperandMajorMode.MN)
        mine = thread % WARPGROUP
        qk, pv, shared = (mma.get_slice(mine) for mma in (qk_mma, pv_mma, shared_mma))
        rP = pv.make_fragment_A(pv.partition_shape_A((_ROWS, c.tile_n)))
        message = cute.make_rmem_tensor(1, Int32)
        message[0] = Int32(0)
        return Consumer(
            number=number,
            row=mine // 32 * 16 + lane // 4,
            lane=lane,
            stages=stages,
            exchange=self.exchange,
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            shared_mma=shared_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(stages.sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(stages.sK)),
            tOrP=shared.make_fragment_A(shared.partition_A(self.exchange.sP)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=rP,
            rP_pairs=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(pv.partition_shape_C((_ROWS, c.half)), Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            scales=cute.make_rmem_tensor(2, Float32),
            message=message,
            scalars=scalars,
        )

    @cute.jit
    def begin_turns(self, w: Consumer):
        """All messages may be written."""
        if w.number == 1:
            for i in cutlass.range_constexpr(_MESSAGES):
                cute.arch.barrier_arrive(barrier_id=int(Barrier.EMPTY) + i, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def first_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32):
        """Scores and probabilities of a tile's first block; its product with V follows in the next step.

        ``fill`` and ``n`` count the fills of Q's ring and of K's and V's from the kernel's start.
        """
        w.rO.fill(0.0)
        if w.number == 0:
            sums = self._scores(w, fill, n)
            w.scales.fill(1.0)
            warpgroup.wait_group(0)
            w.stages.ring_k.release(n)
            rS = self._sum(sums)
            mask.apply(rS, block, "both")
            softmax.online(rS, w.row_max, w.row_sum, w.scalars.scale_log2, first=True, exact=not self.c.normalize)
            softmax.pack_into(w.rP_pairs, rS, self.c.dtype)
            self._send(w)
        if const_expr(self.c.padded):
            self.common._clear_rows(w, mask, n, block)

    @cute.jit
    def next_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Scores of block n beside the output product of block n - 1, then the probabilities of block n."""
        if w.number == 0:
            sums = self._scores(w, fill, n)
            softmax.rescale(w.rO, w.scales)
            self._accumulate(w, n - 1)
            warpgroup.wait_group(1)
            w.stages.ring_k.release(n)
            rS = self._sum(sums)
            if const_expr(edge != ""):
                mask.apply(rS, block, edge)
            elif const_expr(self.c.softcap):
                softmax.cap(rS, w.scalars.cap_slope)
            exact = not self.c.normalize
            w.scales[0], w.scales[1] = softmax.online(
                rS, w.row_max, w.row_sum, w.scalars.scale_log2, first=False, exact=exact
            )
            warpgroup.wait_group(0)
            w.stages.ring_v.release(n - 1)
            softmax.pack_into(w.rP_pairs, rS, self.c.dtype)
            self._send(w)
        else:
            self._receive(w, n - 1)
        if const_expr(self.c.padded and edge != ""):
            self.common._clear_rows(w, mask, n, block)

    @cute.jit
    def last_product(self, w: Consumer, n: Int32):
        if w.number == 0:
            softmax.rescale(w.rO, w.scales)
            self._accumulate(w, n)
            warpgroup.wait_group(0)
            w.stages.ring_v.release(n)
        else:
            self._receive(w, n)

    def _scores(self, w: Consumer, fill: Int32, n: Int32) -> list[cute.Tensor]:
        """Issue the scores of a block, a sum for each half of D: shorter chains of products, whose roundings are
        coarser than those of an addition."""
        w.stages.ring_k.wait(n)
        rQ = w.tSrQ[None, None, None, w.stages.ring_q.slot(fill)]
        rK = w.tSrK[None, None, None, w.stages.ring_k.slot(n)]
        steps, sums = cute.size(rQ, mode=[2]) // 2, []
        for half in range(2):
            rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((_ROWS, self.c.tile_n)), Float32)
            self._multiply(w.qk_mma, rS, rQ, rK, range(half * steps, (half + 1) * steps), clear=True)
            sums.append(rS)
        return sums

    def _sum(self, sums: list[cute.Tensor]) -> cute.Tensor:
        for i in range(cute.size(sums[0])):
            sums[0][i] = sums[0][i] + sums[1][i]
        return sums[0]

    def _accumulate(self, w: Consumer, n: Int32) -> None:
        """Issue the first half's product, with P from registers."""
        w.stages.ring_v.wait(n)
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n) * _CONSUMERS]
        self._multiply(w.pv_mma, w.rO, w.rP, rV, range(cute.size(rV, mode=[2])), clear=False)

    def _multiply(self, mma, acc, a, b, steps: range, *, clear: bool) -> None:
        """Issue ``acc (+)= a b`` over some steps as one group of ``wgmma``, without waiting for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in steps:
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _send(self, w: Consumer):
        """P and the factors of the output before it."""
        slot = self.await_message(w, Barrier.EMPTY)
        pair = cute.make_rmem_tensor(2, self.c.dtype)
        word = cute.recast_tensor(pair, Int32)
        for j in cutlass.range_constexpr(cute.size(w.rP_pairs)):
            word[0] = w.rP_pairs[j]
            row = w.exchange.sP[w.row + 8 * (j % 2), None, slot]
            cute.autovec_copy(pair, cute.local_tile(row, (2,), (j // 2 * 4 + w.lane % 4,)))
        self.leave_factors(w, slot, w.scales)
        cute.arch.fence_view_async_shared()
        self.pass_message(w, Barrier.FULL)

    @cute.jit
    def _receive(self, w: Consumer, n: Int32):
        """The second half's product of block n."""
        slot = self.await_message(w, Barrier.FULL)
        softmax.rescale(w.rO, self.factors(w, slot))
        w.stages.ring_v.wait(n)
        rP = w.tOrP[None, None, None, slot]
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n) * _CONSUMERS + 1]
        self._multiply(w.shared_mma, w.rO, rP, rV, range(cute.size(rV, mode=[2])), clear=False)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n)
        self.pass_message(w, Barrier.EMPTY)

    def await_message(self, w: Consumer, state: Barrier) -> Int32:
        """Wait until the next message is in a state; returns its slot."""
        slot = w.message[0] % _MESSAGES
        cute.arch.barrier(barrier_id=int(state) + slot, number_of_threads=2 * WARPGROUP)
        return slot

    def pass_message(self, w: Consumer, state: Barrier) -> None:
        """Say that it is in the other state."""
        slot = w.message[0] % _MESSAGES
        cute.arch.barrier_arrive(barrier_id=int(state) + slot, number_of_threads=2 * WARPGROUP)
        w.message[0] = w.message[0] + 1

    @cute.jit
    def leave_factors(self, w: Consumer, slot: Int32, factors):
        if w.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                w.exchange.sFactor[w.row + 8 * r, slot] = factors[r]

    def factors(self, w: Consumer, slot: Int32) -> list[Float32]:
        return [w.exchange.sFactor[w.row + 8 * r, slot] for r in range(2)]


class Epilogue(Fixed):
    """In the place of ``epilogue.Epilogue``: row sums, LSE and both halves of the output from registers."""

    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop = config, mainloop

    def _index(self, at: types.OutputRows, token: Int32) -> tuple:
        return (at.q0 + token, at.head) if self.c.varlen else (at.batch, token, at.head)

    @cute.jit
    def store(self, w: Consumer, ins: Inputs, outs: Outputs, at: types.OutputRows):
        """Divide by the row sums and write out, 16 bytes of out per lane."""
        c = self.c
        if w.number == 0:
            self._finish(w, ins, outs, at)
        if const_expr(c.normalize):
            self._exchange_factors(w)
            softmax.rescale(w.rO, w.scales)
        for r in cutlass.range_constexpr(2):
            token = at.row + 8 * r
            for g in cutlass.range_constexpr(c.half // 32):
                pairs = [(16 * g + 4 * j + 2 * r) for j in range(4)]
                words = [op.pack(c.dtype, w.rO[i], w.rO[i + 1]) for i in pairs]
                words = softmax.transpose_quads(words, w.lane % 4)
                if token < at.tokens:
                    column = w.number * c.half + 32 * g + w.lane % 4 * 8
                    address = outs.out[(*self._index(at, token), None)].iterator + column
                    copies.store_words(address.toint(), words)

    @cute.jit
    def _finish(self, w: Consumer, ins: Inputs, outs: Outputs, at: types.OutputRows):
        """LSE and row sums, and into ``scales`` the factors of the result."""
        c = self.c
        for r in cutlass.range_constexpr(2):
            row_sum = softmax.quad_sum(w.row_sum[r])
            row_max = cutlass.select_(w.row_max[r] == -Float32.inf, Float32(0.0), w.row_max[r]) * w.scalars.scale_log2
            lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * Float32(op.LN_2)
            lse = cutlass.select_(row_sum == 0.0, -Float32.inf, lse)
            weight = row_sum
            if const_expr(c.sink):
                weight += exp2(Float32(ins.sink[at.head]) * Float32(op.LOG2_E) - row_max)
            w.scales[r] = cute.arch.rcp_approx(cutlass.select_(row_sum == 0.0, Float32(1.0), weight))
            token = at.row + 8 * r
            if (w.lane % 4 == 0) & (token < at.tokens):
                outs.lse[self._index(at, token)] = lse
                if const_expr(not c.normalize):
                    outs.row_sum[self._index(at, token)] = row_sum

    @cute.jit
    def _exchange_factors(self, w: Consumer):
        """The tile's last message."""
        loop = self.mainloop
        if w.number == 0:
            slot = loop.await_message(w, Barrier.EMPTY)
            loop.leave_factors(w, slot, w.scales)
            loop.pass_message(w, Barrier.FULL)
        else:
            slot = loop.await_message(w, Barrier.FULL)
            w.scales[0], w.scales[1] = loop.factors(w, slot)
            # Nothing else up to the arrival needs them, which must not overtake these loads (``inspect.overtaken``).
            cute.arch.fence_view_async_shared()
            loop.pass_message(w, Barrier.EMPTY)
