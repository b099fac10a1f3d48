"""The mainloop of the Hopper attention kernels: both products and the softmax of a block of keys, one warpgroup a time.

``S' = Q K'`` of the next block and ``O += P V`` of this one are on their way together, and the softmax of the next is
computed under the second product. Scores, probabilities and output stay in registers. Which keys a row sees is the
mask's, what a work tile is and where its result goes the scheduler's.
"""

import enum
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90 import softmax

from .config import WARPGROUP, Config
from .mask import Mask


class NamedBarrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's."""

    PING_PONG = 1  # + consumer: this consumer may issue its products; the one before it arrives
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
    def __init__(self, config: Config):
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
        of_v = major.K if c.fp8 else major.MN
        return self._mma(c.tile_n, major.K), self._mma(c.dim_v, of_v, warpgroup.OperandSource.RMEM)

    def _mma(self, columns: int, major: Any, *source: Any) -> cute.TiledMma:
        """Of all consumers, 64 rows each; with a ``source`` that of P and V."""
        tiles = (self.c.consumers, 1, 1)
        dtype = self.c.v_dtype if source else self.c.dtype
        return hopper.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, major, Float32, tiles, (64, columns), *source
        )

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
        dtypes = self.c.dtype, self.c.dtype, self.c.v_dtype
        return [
            memory.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
            for dtype, layout in zip(dtypes, layouts, strict=True)
        ]  # (M, D, q_stages), (N, D, stages), (N, Dv, stages)

    def consumer(self, thread: Int32, stages: Stages, qk_mma, pv_mma, scalars) -> Consumer:
        """The consumer that ``thread`` of all consumers' belongs to."""
        c = self.c
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        by_column = cute.make_ordered_layout((c.dim_v, c.tile_n, c.v_stages), order=(1, 0, 2))
        sVt = cute.composition(stages.sV, by_column)  # (Dv, N, stages)
        qk, pv = qk_mma.get_slice(group * WARPGROUP), pv_mma.get_slice(group * WARPGROUP)
        rP = pv.make_fragment_A(pv.partition_shape_A((c.tile_m, c.tile_n)))
        row, lane = (thread // 32) * 16 + cute.arch.lane_idx() // 4, cute.arch.lane_idx()
        fragments = [qk.make_fragment_A(qk.partition_A(stages.sQ)), qk.make_fragment_B(qk.partition_B(stages.sK))]
        fragments += [pv.make_fragment_B(pv.partition_B(sVt)), rP, cute.recast_tensor(rP, Int32)]
        rO = cute.make_rmem_tensor(pv.partition_shape_C((c.tile_m, c.dim_v)), Float32)
        statistics = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        return Consumer(group, row, lane, stages, qk_mma, pv_mma, *fragments, rO, *statistics, scalars)

    @property
    def ping_pong(self) -> bool:
        """Whether the consumers issue their products one after another."""
        return self.c.ping_pong and self.c.consumers > 1

    @cute.jit
    def begin_ping_pong(self, w: Consumer):
        """The first consumer issues first."""
        if const_expr(self.ping_pong):
            if w.warpgroup == 0:
                cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.PING_PONG), number_of_threads=2 * WARPGROUP)

    def _await_order(self, w: Consumer) -> None:
        if const_expr(self.ping_pong):
            cute.arch.barrier(barrier_id=int(NamedBarrier.PING_PONG) + w.warpgroup, number_of_threads=2 * WARPGROUP)

    def _pass_order(self, w: Consumer) -> None:
        if const_expr(self.ping_pong):
            after = (w.warpgroup + 1) % self.c.consumers
            cute.arch.barrier_arrive(barrier_id=int(NamedBarrier.PING_PONG) + after, number_of_threads=2 * WARPGROUP)

    def await_consumers(self) -> None:
        cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=WARPGROUP * self.c.consumers)

    def _multiply(self, mma, acc, a, b, *, clear: bool, steps: range | None = None) -> None:
        """Issue ``acc (+)= a b``, or some steps of it, as one group of ``wgmma``, without waiting for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in steps or range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _scores(self, w: Consumer, fill: Int32, n: Int32) -> Any:
        """Issue the scores of block n."""
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((self.c.tile_m, self.c.tile_n)), Float32)
        rQ = w.tSrQ[None, None, None, w.stages.ring_q.slot(fill)]
        rK = w.tSrK[None, None, None, w.stages.ring_k.slot(n)]
        self._multiply(w.qk_mma, rS, rQ, rK, clear=True)
        return rS

    def _sum(self, scores: Any) -> cute.Tensor:
        """The scores, when they are there."""
        return scores

    def _issue_pv(self, w: Consumer, n: Int32) -> cute.Tensor:
        """Issue P times block n of V, added to the output so far; returns the accumulator."""
        self._multiply(w.pv_mma, w.rO, w.rP, w.tOrV[None, None, None, w.stages.ring_v.slot(n)], clear=False)
        return w.rO

    def _add(self, w: Consumer, rB: cute.Tensor) -> None:
        """Add the product to the output, where ``_issue_pv`` does not."""

    @property
    def late_rescale(self) -> bool:
        """Whether the output is rescaled beside the scores of the next block, rather than before them."""
        return self.c.late_rescale

    def _rescale(self, w: Consumer) -> None:
        if const_expr(self.late_rescale):
            softmax.rescale(w.rO, w.scales)

    def _keep_scales(self, w: Consumer, scales: list) -> None:
        if const_expr(self.late_rescale):
            w.scales[0], w.scales[1] = scales
        else:
            softmax.rescale(w.rO, scales)

    def _pack(self, w: Consumer, rS: cute.Tensor) -> None:
        """Round P."""
        softmax.pack_into(w.rP_pairs, rS, self.c.v_dtype)

    def _online(self, w: Consumer, rS: cute.Tensor, *, first: bool) -> list:
        c = self.c
        rules = {"first": first, "exact": not c.normalize} | ({"p_scale_log2": c.p_offset} if c.fp8 else {})
        return softmax.online(rS, w.row_max, w.row_sum, w.scalars.scale_log2, **rules)

    @cute.jit
    def first_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32):
        """Scores and probabilities of a tile's first block; its product with V follows in the next step.

        ``fill`` and ``n`` count the fills of Q's ring and of K's and V's from the kernel's start.
        """
        self._first_scores(w, mask, fill, n, block)
        if const_expr(self.c.padded):
            self._clear_rows(w, mask, n, block)

    def _first_scores(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32) -> None:
        w.stages.ring_k.wait(n)
        scores = self._scores(w, fill, n)
        w.rO.fill(0.0)
        w.scales.fill(1.0)
        warpgroup.wait_group(0)
        w.stages.ring_k.release(n)
        rS = self._sum(scores)
        mask.apply(rS, block, "both")
        self._online(w, rS, first=True)
        self._pack(w, rS)

    @cute.jit
    def next_block(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Scores of block n beside the output product of block n - 1, then the probabilities of block n."""
        self._next_scores(w, mask, fill, n, block, edge)
        if const_expr(self.c.padded and edge != ""):
            self._clear_rows(w, mask, n, block)

    def _next_scores(self, w: Consumer, mask: Mask, fill: Int32, n: Int32, block: Int32, edge: str) -> None:
        w.stages.ring_k.wait(n)
        self._await_order(w)
        scores = self._scores(w, fill, n)
        self._rescale(w)
        w.stages.ring_v.wait(n - 1)
        rB = self._issue_pv(w, n - 1)
        self._pass_order(w)
        warpgroup.wait_group(1)
        w.stages.ring_k.release(n)
        rS = self._sum(scores)
        if edge != "":
            mask.apply(rS, block, edge)
        elif self.c.softcap:
            softmax.cap(rS, w.scalars.cap_slope)
        scales = self._online(w, rS, first=False)
        # ptxas moves most exponentials behind this wait, among the multiplications of the output, and that is best:
        # a branch that keeps them before it costs 8 % on an H200 (D 128, 2 x 8192).
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n - 1)
        self._add(w, rB)
        self._keep_scales(w, scales)
        self._pack(w, rS)

    def last_product(self, w: Consumer, n: Int32) -> None:
        self._rescale(w)
        w.stages.ring_v.wait(n)
        rB = self._issue_pv(w, n)
        warpgroup.wait_group(0)
        w.stages.ring_v.release(n)
        self._add(w, rB)

    @cute.jit
    def _clear_rows(self, w: Consumer, mask: Mask, n: Int32, block: Int32):
        """Write 0 over the rows of V's block at which nobody looks, before the tensor cores read them.

        All consumers share the work and wait: none may read what another has yet to write, though it be zeros.
        """
        c = self.c
        low, high = block * c.tile_n, (block + 1) * c.tile_n
        masked = mask.masked_keys()
        if masked.overlap(low, high):
            w.stages.ring_v.wait(n)
            slot = w.stages.ring_v.slot(n)
            zeros = cute.make_rmem_tensor(8, c.v_dtype)
            zeros.fill(0.0)
            chunks = c.dim_v // 8
            threads = WARPGROUP * c.consumers
            for i in cutlass.range(cute.arch.thread_idx()[0] - WARPGROUP, c.tile_n * chunks, threads, unroll=1):
                key = low + i // chunks
                if masked.hold(key):
                    row = w.stages.sV[i // chunks, None, slot]
                    cute.autovec_copy(zeros, cute.local_tile(row, (8,), (i % chunks,)))
            cute.arch.fence_view_async_shared()
            self.await_consumers()
