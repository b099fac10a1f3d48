"""Consumer mainloop where all keys of a CTA are resident: one softmax, no rescaling.

    warpgroup 0   Q, columns 0 to D/2 -> registers | its part of S | S -> P | O, columns 0 to D/2
    warpgroup 1   Q, columns D/2 to D              | its part of S | S -> P | O, columns D/2 to D

At decode sizes we are latency-bound on warpgroup syncs. Each warpgroup computes QK^T over half of D, exchanges partial
scores once through smem, runs the same softmax, and multiplies its half of V.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars
from .barriers import Barriers, NamedBarrier, sync_consumers
from .config import COLUMN_CHUNKS, HALVES, LANES, Config
from .mainloop import to_scores
from .split_combine import load_shared_floats

_INF = float("inf")


@dataclass
class SinglePassFragments(Fixed):
    """A warpgroup's MMA fragments and accumulators."""

    thread: Int32  # of the warpgroup
    qk_mma: cute.TiledMma  # Q from registers
    own_mma: cute.TiledMma  # P from registers
    rQ: cute.Tensor  # (64, part) as a left side
    rQWords: cute.Tensor  # the same in pairs
    tSrK: cute.Tensor  # (1, 1, part / 16, stages * halves)
    tOrV: cute.Tensor  # (1, 1, N / 16, stages * halves)
    rP: list[cute.Tensor]  # of each tile (64, N) as a left side
    rO: cute.Tensor  # (64, part)


class SinglePassMainloop:
    """``half``: index of the warpgroup, and of its columns of Q, K and O."""

    def __init__(self, config: Config, half: int):
        self.c, self.half = config, half
        self.query_bytes = HEADS * config.ring.part * config.itemsize  # of Q, half of the columns

    def fragments(self, shared: Int32) -> SinglePassFragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread, registers = cute.arch.thread_idx()[0] % THREADS, warpgroup.OperandSource.RMEM
        qk_mma, own_mma = (
            hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, major, Float32, (1, 1, 1), (HEADS, columns), registers)
            for major, columns in ((K, c.keys), (MN, c.ring.part))
        )
        sKV = wgmma.keys_by_columns(c.ring, c.shared.ring.at(shared))
        qk, own = qk_mma.get_slice(thread), own_mma.get_slice(thread)
        rQ = qk.make_fragment_A(qk.partition_shape_A((HEADS, c.ring.part)))
        return SinglePassFragments(
            thread=thread,
            qk_mma=qk_mma,
            own_mma=own_mma,
            rQ=rQ,
            rQWords=cute.recast_tensor(rQ, Int32),
            tSrK=qk.make_fragment_B(qk.partition_B(sKV)),
            tOrV=own.make_fragment_B(own.partition_B(wgmma.columns_by_keys(c.ring, sKV))),
            rP=[own.make_fragment_A(own.partition_shape_A((HEADS, c.keys))) for _ in range(c.stages)],
            rO=cute.make_rmem_tensor(own.partition_shape_C((HEADS, c.ring.part)), Float32),
        )

    @cute.jit
    def run(self, scalars: Scalars, shared: Int32, barriers: Barriers, w: SinglePassFragments):
        """Leaves O in registers; returns row maxima and sums of the lane's two rows."""
        c = self.c
        scores = [cute.make_rmem_tensor(w.qk_mma.partition_shape_C((HEADS, c.keys)), Float32) for _ in range(c.stages)]
        self._read_query(shared, barriers, w)
        for n, rS in enumerate(scores):
            barriers.tiles.wait(Int32(n * HALVES + self.half))
            cute.arch.fence_view_async_shared()
            wgmma.multiply(w.qk_mma, rS, w.rQ, w.tSrK[None, None, None, n * HALVES + self.half], clear=True)
        self._join(shared, w.thread, scores)
        barriers.arrive_query_read(scalars.ctas)
        for n, rS in enumerate(scores):
            to_scores(c, scalars.scale, barriers.mask(shared), Int32(n), rS)
        maxima, sums = self._probabilities(scores)
        for n, (rP, rS) in enumerate(zip(w.rP, scores, strict=True)):
            softmax.pack_into(cute.recast_tensor(rP, Int32), rS, c.dtype)
            wgmma.multiply(w.own_mma, w.rO, rP, w.tOrV[None, None, None, n * HALVES + self.half], clear=n == 0)
        sums = [wgmma.lanes_sum(x) for x in sums]
        warpgroup.wait_group(0)
        sync_consumers()  # the ring is free for partials
        return maxima, sums

    def _query(self, shared: Int32) -> Int32:
        """Address of this warpgroup's columns of Q, later of its partial scores."""
        return self.c.shared.query.at(shared) + self.half * self.query_bytes

    @cute.jit
    def _read_query(self, shared: Int32, barriers: Barriers, w: SinglePassFragments):
        """Load this warpgroup's columns of Q to registers."""
        barriers.query.wait(Int32(0))
        lane = cute.arch.lane_idx()
        row = w.thread // LANES * 16 + lane % 16
        at = self._query(shared) + row * ROW_BYTES
        for k in cutlass.range_constexpr(self.c.ring.part // 16):
            chunk = 2 * k % COLUMN_CHUNKS + lane // 16
            block = const_expr(2 * k // COLUMN_CHUNKS * (HEADS * ROW_BYTES))
            words = op.ldmatrix_x4(at + block + (chunk ^ (row & 7)) * CHUNK)
            for j in cutlass.range_constexpr(4):
                w.rQWords[4 * k + j] = words[j]
        # Partial scores overwrite Q.
        cute.arch.barrier(barrier_id=int(NamedBarrier.WARPGROUP) + self.half, number_of_threads=THREADS)

    def _join(self, shared: Int32, thread: Int32, scores: list[cute.Tensor]) -> None:
        """Wait for S and add the other warpgroup's part, as many tiles at once as fit over Q."""
        capacity = self.query_bytes // (HEADS * self.c.keys * 4)
        for n in range(0, len(scores), capacity):
            some = scores[n : n + capacity]
            warpgroup.wait_group(len(scores) - n - len(some))
            if n > 0:
                sync_consumers()  # the other warpgroup has read the last batch
            self._exchange(shared, thread, some)

    def _exchange(self, shared: Int32, thread: Int32, scores: list[cute.Tensor]) -> None:
        """Add the other warpgroup's partial scores through shared memory, over Q; 16 bytes a thread, conflict-free."""
        fours = [(rS, i) for rS in scores for i in range(0, cute.size(rS), 4)]
        at, each = self._query(shared) + thread * CHUNK, THREADS * CHUNK
        for n, (rS, i) in enumerate(fours):
            words = [rS[i + x].bitcast(Int32) for x in range(4)]
            copies.store_words(at + n * each, words, cute.AddressSpace.smem)
        sync_consumers()
        at += (1 - 2 * self.half) * self.query_bytes
        for n, (rS, i) in enumerate(fours):
            other = load_shared_floats(4, at + n * each)
            for x in range(4):
                rS[i + x] = rS[i + x] + other[x]
        # Reads are done before peers' bulk copies may overwrite.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def _probabilities(self, scores: list[cute.Tensor]):
        """S to P in place; returns row maxima, and this lane's share of the sums."""
        maxima, sums = [], []
        for r in cutlass.range_constexpr(2):
            top = softmax.peak(scores[0], r)
            for rS in scores[1:]:
                top = cute.arch.fmax(top, softmax.peak(rS, r))
            base, parts = finite(top), [Float32(0.0), Float32(0.0)]
            for rS in scores:
                for i in cutlass.range_constexpr(2 * r, cute.size(rS), 4):
                    for x in cutlass.range_constexpr(2):
                        rS[i + x] = exp2(rS[i + x] - base)
                        parts[x] = parts[x] + rS[i + x]
            maxima.append(top)
            sums.append(parts[0] + parts[1])
        return maxima, sums
