"""The mainloop of ``prefill.py`` for E4M3 on Hopper: both products by FP8 ``wgmma``, with V transposed beforehand.

Products of bytes take both operands along K, so V's block lies as (Dv, N) in shared memory, a column's keys together
(``transposed.py`` wrote it so). A step takes 32 keys, of which a lane of the first operand has two runs of four, while
it has four pairs of scores, as accumulators lie. V's keys are in the order of these pairs, so P needs no shuffle.

Tensor cores keep 14 bits of such a sum (``oracle/tensor_cores.py``). With ``promote`` they add up one block of keys,
and the output of all blocks is added up in float32: the factor that its rescaling takes is that of an fma. Imports
cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax

from . import mainloop, types
from .mainloop import WARPGROUP, Consumer, Mask, Stages


@dataclass(frozen=True, kw_only=True)
class Config(types.Config):
    """What is fixed at compile time."""

    promote: bool = True  # sums of several blocks of keys are added up in float32

    @property
    def padded(self) -> bool:
        """Rows of V at which nobody looks are zeros since it was transposed."""
        return False


class Mainloop(Fixed):
    """In the place of ``mainloop.Mainloop``."""

    def __init__(self, config: Config):
        self.c, self.common = config, mainloop.Mainloop(config)
        self.layout, self.rings, self.operands = self.common.layout, self.common.rings, self.common.operands
        self.begin_turns = self.common.begin_turns

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The two products: of Q and K, both in shared memory, and of P in registers and V."""
        c, along_k = self.c, OperandMajorMode.K
        make = lambda columns, *source: hopper.make_trivial_tiled_mma(
            c.dtype, c.dtype, along_k, along_k, Float32, (c.consumers, 1, 1), (64, columns), *source
        )
        return make(c.tile_n), make(c.dim_v, warpgroup.OperandSource.RMEM)

    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> Consumer:
        """The consumer that ``thread`` of all consumers' belongs to."""
        c = self.c
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        qk, pv = (mma.get_slice(group * WARPGROUP) for mma in (qk_mma, pv_mma))
        tSrQ = qk.make_fragment_A(qk.partition_A(stages.sQ))  # (mma, M, D, q_stages)
        tSrK = qk.make_fragment_B(qk.partition_B(stages.sK))  # (mma, N, D, stages)
        tOrV = pv.make_fragment_B(pv.partition_B(stages.sV))  # (mma, Dv, N, stages)
        rP = pv.make_fragment_A(pv.partition_shape_A((c.tile_m, c.tile_n)))  # (mma, M, N)
        rO = cute.make_rmem_tensor(pv.partition_shape_C((c.tile_m, c.dim_v)), Float32)  # (mma, M, Dv)
        lane, statistics = cute.arch.lane_idx(), [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        row = thread // 32 * 16 + lane // 4
        words = cute.recast_tensor(rP, Int32)  # of four numbers of P
        return Consumer(group, row, lane, stages, qk_mma, pv_mma, tSrQ, tSrK, tOrV, rP, words, rO, *statistics, scalars)

    @cute.jit
    def first_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32):
        """Scores and probabilities of a tile's first block; its product with V follows in the next step.

        ``fill`` and ``n`` count the fills of Q's ring and of K's and V's from the kernel's start.
        """
        w.stages.ring_k.wait(n)
        rS = self.common._scores(w, fill, n)
        w.rO.fill(0.0)
        w.scales.fill(1.0)
        warpgroup.wait_group(0)
        w.stages.ring_k.release(n)
        mask.apply(rS, block, "both")
        self._online(w, rS, first=True)
        self._pack(w, rS)

    @cute.jit
    def next_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Scores of block n beside the output product of block n - 1, then the probabilities of block n."""
        w.stages.ring_k.wait(n)
        self.common._await_turn(w)
        rS = self.common._scores(w, fill, n)
        if const_expr(not self.c.promote):
            softmax.rescale(w.rO, w.scales)
        w.stages.ring_v.wait(n - 1)
        rB = self._multiply(w, n - 1)
        self.common._pass_turn(w)
        warpgroup.wait_group(1)
        w.stages.ring_k.release(n)
        if const_expr(edge != ""):
            mask.apply(rS, block, edge)
        elif const_expr(self.c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        scales = self._online(w, rS, first=False)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n - 1)
        self._promote(w, rB)
        w.scales[0], w.scales[1] = scales
        self._pack(w, rS)

    def last_product(self, w: Consumer, n: Int32) -> None:
        if const_expr(not self.c.promote):
            softmax.rescale(w.rO, w.scales)
        w.stages.ring_v.wait(n)
        rB = self._multiply(w, n)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n)
        self._promote(w, rB)

    def _multiply(self, w: Consumer, n: Int32) -> cute.Tensor:
        """Issue P times block n of V, added to the output so far or, to be promoted, by itself."""
        rB = cute.make_rmem_tensor(w.rO.layout, Float32) if self.c.promote else w.rO
        rV = w.tOrV[None, None, None, w.stages.ring_v.slot(n)]
        self.common._multiply(w.pv_mma, rB, w.rP, rV, clear=self.c.promote)
        return rB

    def _promote(self, w: Consumer, rB: cute.Tensor) -> None:
        """The output of the blocks so far, times its factors, and that of one more."""
        if const_expr(self.c.promote):
            for i in range(cute.size(rB)):
                w.rO[i] = op.fma(w.rO[i], w.scales[i // 2 % 2], rB[i])

    def _online(self, w: Consumer, rS: cute.Tensor, *, first: bool) -> list[Float32]:
        c = self.c
        rules = {"first": first, "exact": not c.normalize, "lift": c.lift}
        return softmax.online(rS, w.row_max, w.row_sum, w.scalars.scale_log2, **rules)

    def _pack(self, w: Consumer, rS: cute.Tensor) -> None:
        """Round P. A word of the operand is a row's (of two, 8 apart) two pairs of neighbouring 8 columns."""
        for i in range(cute.size(w.rP_pairs)):
            step, half, row = i // 4, i // 2 % 2, i % 2
            first = 4 * (4 * step + 2 * half) + 2 * row  # of a pair in the accumulator; the other 8 columns on
            w.rP_pairs[i] = op.pack_e4m3([rS[j] for j in (first, first + 1, first + 4, first + 5)])
