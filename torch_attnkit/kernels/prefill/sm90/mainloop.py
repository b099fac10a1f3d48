"""The mainloop of the Hopper attention kernels: both products and the softmax of a block of keys, one warpgroup a time.

``S' = Q K'`` of the next block and ``O += P V`` of this one are on their way together, and the softmax of the next is
computed under the second product. Scores, probabilities and output stay in registers. Which keys a row sees is the
mask's, what a work tile is and where its result goes the kernel's: both kernels have a ``Mainloop``.
"""

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90 import softmax

from ..blocks import UnseenKeys

WARPGROUP = 128  # threads


class Barrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's."""

    TURN = 1  # + consumer: this consumer may issue its products; the one before it arrives
    Q_STORED = 4  # + consumer: this consumer's threads have stored their rows of Q
    CONSUMERS = 7  # all consumers are here


@dataclass
class Stages(Fixed):
    """Q, K and V in shared memory, and the rings of mbarriers that guard them."""

    ring_q: Ring
    ring_k: Ring
    ring_v: Ring
    sQ: cute.Tensor  # (M, D, q_stages)
    sK: cute.Tensor  # (N, D, stages)
    sV: cute.Tensor  # (N, Dv, stages)


class Mask(Protocol):
    """Which keys the rows of a work tile see."""

    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        """Cap the scores, then give -inf to those of keys that a row must not see.

        ``edge`` says which edges of what is seen may cross the block: "both", or "left" where the right one cannot.
        """

    def unseen(self) -> UnseenKeys:
        """The keys at which no row looks."""


@dataclass
class Consumer(Fixed):
    """What one consumer warpgroup works on: its slices of the operands, its accumulators, its row statistics."""

    warpgroup: Int32  # its number among the consumers
    row: Int32  # this lane's first row of the tile; the other is 8 below
    lane: Int32
    stages: Stages
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma
    tSrQ: cute.Tensor  # (mma, M, D, q_stages), descriptors of shared memory
    tSrK: cute.Tensor  # (mma, N, D, stages)
    tOrV: cute.Tensor  # (mma, Dv, N, stages)
    rP: cute.Tensor  # (mma, M, N), in the operands' dtype
    rP_pairs: cute.Tensor  # the same as pairs, Int32
    rO: cute.Tensor  # (mma, M, Dv), float32
    row_max: cute.Tensor  # (2), of this lane's rows; unscaled
    row_sum: cute.Tensor  # (2), this lane's part
    scales: cute.Tensor  # (2), what the output so far is still to be multiplied by
    scalars: Any  # with scale_log2 and cap_slope


class Mainloop(Fixed):
    """Of the kernel's Config it needs dtype, dim, dim_v, tile_m, tile_n, stages, consumers, padded, pair, turns,
    late_rescale and softcap."""

    def __init__(self, config: Any):
        self.c = config

    def layout(self, shape: tuple[int, ...]) -> cute.ComposedLayout:
        """The layout of an operand in shared memory, (rows, columns, stages), with a row's columns together."""
        return cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(
                hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.c.dtype, shape[1]), self.c.dtype
            ),
            shape,
            order=(0, 1, 2)[: len(shape)],
        )

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The two products: of Q and K, both in shared memory, and of P in registers and V."""
        c, major = self.c, OperandMajorMode
        qk_mma = hopper.make_trivial_tiled_mma(
            c.dtype, c.dtype, major.K, major.K, Float32, (c.consumers, 1, 1), (64, c.tile_n)
        )
        pv_mma = hopper.make_trivial_tiled_mma(
            c.dtype,
            c.dtype,
            major.K,
            major.MN,
            Float32,
            (c.consumers, 1, 1),
            (64, c.dim_v),
            warpgroup.OperandSource.RMEM,
        )
        return qk_mma, pv_mma

    @cute.jit
    def rings(self, memory, warp: Int32, sizes: cutlass.Constexpr):
        """A ring for each (stages, whether the CTAs of a pair fill it together), which warp 0 initialises."""
        rings = []
        for stages, pair in sizes:
            full = memory.allocate_array(cutlass.Int64, stages)
            empty = memory.allocate_array(cutlass.Int64, stages)
            rings.append(Ring(full, empty, stages, pair))
        if warp == 0:
            with cute.arch.elect_one():
                for ring in rings:
                    for i in cutlass.range_constexpr(ring.stages):
                        cute.arch.mbarrier_init(ring.full + i, 1)
                        cute.arch.mbarrier_init(ring.empty + i, 4 * self.c.consumers * (2 if ring.pair else 1))
        return rings

    def operands(self, memory, layouts) -> list[cute.Tensor]:
        """sQ, sK and sV of ``Stages``."""
        return [
            memory.allocate_tensor(self.c.dtype, layout.outer, 1024, swizzle=layout.inner) for layout in layouts
        ]  # (M, D, q_stages), (N, D, stages), (N, Dv, stages)

    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> Consumer:
        """The consumer that ``thread`` of all consumers' belongs to."""
        c = self.c
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        by_column = cute.make_ordered_layout((c.dim_v, c.tile_n, c.stages), order=(1, 0, 2))
        sVt = cute.composition(stages.sV, by_column)  # (Dv, N, stages)
        qk, pv = qk_mma.get_slice(group * WARPGROUP), pv_mma.get_slice(group * WARPGROUP)
        rP = pv.make_fragment_A(pv.partition_shape_A((c.tile_m, c.tile_n)))
        return Consumer(
            warpgroup=group,
            row=(thread // 32) * 16 + cute.arch.lane_idx() // 4,
            lane=cute.arch.lane_idx(),
            stages=stages,
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(stages.sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(stages.sK)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=rP,
            rP_pairs=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(pv.partition_shape_C((c.tile_m, c.dim_v)), Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            scales=cute.make_rmem_tensor(2, Float32),
            scalars=scalars,
        )

    @property
    def in_turns(self) -> bool:
        """Whether the consumers issue their products in turn."""
        return self.c.turns and self.c.consumers > 1

    @cute.jit
    def begin_turns(self, w: Consumer):
        """The first consumer's turn is the first."""
        if const_expr(self.in_turns):
            if w.warpgroup == 0:
                cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN), number_of_threads=2 * WARPGROUP)

    def _await_turn(self, w: Consumer) -> None:
        if const_expr(self.in_turns):
            cute.arch.barrier(barrier_id=int(Barrier.TURN) + w.warpgroup, number_of_threads=2 * WARPGROUP)

    def _pass_turn(self, w: Consumer) -> None:
        if const_expr(self.in_turns):
            after = (w.warpgroup + 1) % self.c.consumers
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN) + after, number_of_threads=2 * WARPGROUP)

    def await_consumers(self) -> None:
        cute.arch.barrier(barrier_id=int(Barrier.CONSUMERS), number_of_threads=WARPGROUP * self.c.consumers)

    def _multiply(self, mma, acc, a, b, *, clear: bool) -> None:
        """Issue ``acc (+)= a b`` as one group of ``wgmma``, without waiting for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _scores(self, w: Consumer, fill: Int32, n: Int32) -> cute.Tensor:
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((self.c.tile_m, self.c.tile_n)), Float32)
        rQ = w.tSrQ[None, None, None, w.stages.ring_q.slot(fill)]
        rK = w.tSrK[None, None, None, w.stages.ring_k.slot(n)]
        self._multiply(w.qk_mma, rS, rQ, rK, clear=True)
        return rS

    def _accumulate(self, w: Consumer, n: Int32) -> None:
        self._multiply(w.pv_mma, w.rO, w.rP, w.tOrV[None, None, None, w.stages.ring_v.slot(n)], clear=False)

    @cute.jit
    def first_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32):
        """Scores and probabilities of a tile's first block; its product with V follows in the next step.

        ``fill`` and ``n`` count the fills of Q's ring and of K's and V's from the kernel's start.
        """
        w.stages.ring_k.wait(n)
        rS = self._scores(w, fill, n)
        w.rO.fill(0.0)
        w.scales.fill(1.0)
        warpgroup.wait_group(0)
        w.stages.ring_k.release(n)
        mask.apply(rS, block, "both")
        softmax.online(rS, w.row_max, w.row_sum, w.scalars.scale_log2, first=True, exact=not self.c.normalize)
        softmax.pack_into(w.rP_pairs, rS, self.c.dtype)
        if const_expr(self.c.padded):
            self._clear_rows(w, mask, n, block)

    @cute.jit
    def next_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Scores of block n beside the output product of block n - 1, then the probabilities of block n."""
        w.stages.ring_k.wait(n)
        self._await_turn(w)
        rS = self._scores(w, fill, n)
        if const_expr(self.c.late_rescale):
            softmax.rescale(w.rO, w.scales)
        w.stages.ring_v.wait(n - 1)
        self._accumulate(w, n - 1)
        self._pass_turn(w)
        warpgroup.wait_group(1)
        w.stages.ring_k.release(n)
        if const_expr(edge != ""):
            mask.apply(rS, block, edge)
        elif const_expr(self.c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        scales = softmax.online(rS, w.row_max, w.row_sum, w.scalars.scale_log2, first=False, exact=not self.c.normalize)
        # ptxas moves most exponentials behind this wait, among the multiplications of the output, and that is best:
        # a branch that keeps them before it costs 8 % on an H200 (D 128, 2 x 8192).
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n - 1)
        if const_expr(self.c.late_rescale):
            w.scales[0], w.scales[1] = scales
        else:
            softmax.rescale(w.rO, scales)
        softmax.pack_into(w.rP_pairs, rS, self.c.dtype)
        if const_expr(self.c.padded and edge != ""):
            self._clear_rows(w, mask, n, block)

    def last_product(self, w: Consumer, n: Int32) -> None:
        if const_expr(self.c.late_rescale):
            softmax.rescale(w.rO, w.scales)
        w.stages.ring_v.wait(n)
        self._accumulate(w, n)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n)

    @cute.jit
    def _clear_rows(self, w: Consumer, mask: Mask, n: Int32, block: Int32):
        """Write 0 over the rows of V's block at which nobody looks, before the tensor cores read them.

        All consumers share the work and wait: none may read what another has yet to write, though it be zeros.
        """
        c = self.c
        low, high = block * c.tile_n, (block + 1) * c.tile_n
        unseen = mask.unseen()
        if unseen.overlap(low, high):
            w.stages.ring_v.wait(n)
            slot = w.stages.ring_v.slot(n)
            zeros = cute.make_rmem_tensor(8, c.dtype)
            zeros.fill(0.0)
            chunks = c.dim_v // 8
            threads = WARPGROUP * c.consumers
            for i in cutlass.range(cute.arch.thread_idx()[0] - WARPGROUP, c.tile_n * chunks, threads, unroll=1):
                key = low + i // chunks
                if unseen.hold(key):
                    row = w.stages.sV[i // chunks, None, slot]
                    cute.autovec_copy(zeros, cute.local_tile(row, (8,), (i % chunks,)))
            cute.arch.fence_view_async_shared()
            self.await_consumers()
