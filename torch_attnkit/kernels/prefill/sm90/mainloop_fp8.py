"""The mainloop for E4M3 on Hopper: both products by FP8 ``wgmma``, with V transposed.

Products of bytes take both operands along K, so V's block lies as (Dv, N) in shared memory, a column's keys together
(``transpose_v.py`` wrote it so). A step takes 32 keys, of which a lane of the first operand has two runs of four, while
it has four pairs of scores, as accumulators lie. V's keys are in the order of these pairs, so P needs no shuffle.

Tensor cores keep 14 bits of such a sum (``oracle/tensor_cores.py``). With ``promote`` they add up one block of keys,
and the output of all blocks is added up in float32: the factor that its rescaling takes is that of an fma.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm90 import softmax

from .config import WARPGROUP
from .mainloop import Consumer, Mainloop, Stages


class MainloopFp8(Mainloop):
    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> Consumer:
        c = self.c
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        qk, pv = (mma.get_slice(group * WARPGROUP) for mma in (qk_mma, pv_mma))
        tSrQ = qk.make_fragment_A(qk.partition_A(stages.sQ))
        tSrK = qk.make_fragment_B(qk.partition_B(stages.sK))
        tOrV = pv.make_fragment_B(pv.partition_B(stages.sV))
        rP = pv.make_fragment_A(pv.partition_shape_A((c.tile_m, c.tile_n)))
        rO = cute.make_rmem_tensor(pv.partition_shape_C((c.tile_m, c.dim_v)), Float32)
        lane, statistics = cute.arch.lane_idx(), [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        row = thread // 32 * 16 + lane // 4
        words = cute.recast_tensor(rP, Int32)  # of four elements of P
        return Consumer(group, row, lane, stages, qk_mma, pv_mma, tSrQ, tSrK, tOrV, rP, words, rO, *statistics, scalars)

    @property
    def late_rescale(self) -> bool:
        """Where blocks are promoted, their sum takes the factor."""
        return True

    def _rescale(self, w: Consumer) -> None:
        if const_expr(not self.c.promote):
            softmax.rescale(w.rO, w.scales)

    def _issue_pv(self, w: Consumer, n: Int32) -> cute.Tensor:
        """Issue P times block n of V, added to the output so far or, to be promoted, by itself."""
        rB = cute.make_rmem_tensor(w.rO.layout, Float32) if self.c.promote else w.rO
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n)]
        self._multiply(w.pv_mma, rB, w.rP, rV, clear=self.c.promote)
        return rB

    def _add(self, w: Consumer, rB: cute.Tensor) -> None:
        """The output of the blocks so far, times its factors, and that of one more."""
        if const_expr(self.c.promote):
            for i in range(cute.size(rB)):
                w.rO[i] = op.fma(w.rO[i], w.scales[i // 2 % 2], rB[i])

    def _pack(self, w: Consumer, rS: cute.Tensor) -> None:
        """Round P. A word of the operand is a row's (of two, 8 apart) two pairs of neighbouring 8 columns."""
        for i in range(cute.size(w.rP_pairs)):
            step, half, row = i // 4, i // 2 % 2, i % 2
            first = 4 * (4 * step + 2 * half) + 2 * row  # of a pair in the accumulator; the other 8 columns on
            w.rP_pairs[i] = op.pack_e4m3([rS[j] for j in (first, first + 1, first + 4, first + 5)])
