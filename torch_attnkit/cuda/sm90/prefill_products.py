"""What every Hopper kernel for softmax attention with ``wgmma`` does with a block of keys, one warpgroup at a time.

``S' = Q K'`` of the next block and ``O += P V`` of this one are on their way together, and the softmax of the next is
computed under the second product. Scores, probabilities and output stay in registers. Which keys a row sees is the
subclass's (``_mask``), and so is what a tile is and where its result goes.
"""

import enum
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..prefill_tiles import Sequence, outside
from ..ring import Fixed
from . import prefill_softmax as softmax

WARPGROUP = 128  # threads


class Barrier(enum.IntEnum):
    """Named barriers. 0 is the whole CTA's."""

    TURN = 1  # + consumer: this consumer may issue its products; the one before it arrives
    BROUGHT = 4  # + consumer: this consumer's threads have brought their rows of Q
    ALL = 7  # all consumers are here


class Worker(Fixed, SimpleNamespace):
    """What one consumer warpgroup works on: its slices of operands, its accumulators, its row statistics."""


def split(atom: cute.CopyAtom, rank: Int32, ctas: int, s: cute.Tensor, g: cute.Tensor) -> tuple:
    """The two sides of this CTA's part of a TMA copy, each with one mode that the copy moves at once."""
    return cpasync.tma_partition(
        atom, rank, cute.make_layout(ctas), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )


class Products:
    """The base of kernels. Of its Config it needs dtype, dim, dim_v, tile_m, tile_n, stages, consumers, padded, turns,
    late_rescale and softcap, and of the worker's scalars scale_log2 and cap_slope."""

    def __init__(self, config: Any):
        self.c = config

    def _mask(self, w, rS: cute.Tensor, seq: Sequence, block: Int32, position: Int32, edge: str) -> None:
        """Cap the scores, then give -inf to those of keys that a row must not see. ``position`` is the tile's first.

        ``edge`` says which edges of what is seen may cross the block: "both", or "left" where the right one cannot.
        """
        raise NotImplementedError

    def _staged(self, shape: tuple[int, ...]) -> cute.ComposedLayout:
        """The layout of an operand in shared memory, (rows, columns, stages), with a row's columns together."""
        return cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(
                hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.c.dtype, shape[1]), self.c.dtype
            ),
            shape,
            order=(0, 1, 2)[: len(shape)],
        )

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
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

    def _worker(self, thread: Int32, rings, staged, qk_mma, pv_mma, scalars) -> Worker:
        """The consumer that ``thread`` of all consumers' belongs to."""
        c = self.c
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        sQ, sK, sV = staged
        sVt = cute.composition(sV, cute.make_ordered_layout((c.dim_v, c.tile_n, c.stages), order=(1, 0, 2)))
        qk, pv = qk_mma.get_slice(group * WARPGROUP), pv_mma.get_slice(group * WARPGROUP)
        rP = pv.make_fragment_A(pv.partition_shape_A((c.tile_m, c.tile_n)))
        return Worker(
            group=group,
            row=(thread // 32) * 16 + cute.arch.lane_idx() // 4,  # this lane's first row of the tile
            lane=cute.arch.lane_idx(),
            q=rings[0],
            k=rings[1],
            v=rings[2],
            sV=sV,
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(sK)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=rP,
            words=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(pv.partition_shape_C((c.tile_m, c.dim_v)), Float32),
            top=cute.make_rmem_tensor(2, Float32),
            total=cute.make_rmem_tensor(2, Float32),
            scales=cute.make_rmem_tensor(2, Float32),  # what the output so far is still to be multiplied by
            scalars=scalars,
        )

    @property
    def _turns(self) -> bool:
        return self.c.turns and self.c.consumers > 1

    def _await_turn(self, w) -> None:
        if const_expr(self._turns):
            cute.arch.barrier(barrier_id=int(Barrier.TURN) + w.group, number_of_threads=2 * WARPGROUP)

    def _pass_turn(self, w) -> None:
        if const_expr(self._turns):
            after = (w.group + 1) % self.c.consumers
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN) + after, number_of_threads=2 * WARPGROUP)

    def _multiply(self, mma, acc, a, b, *, clear: bool) -> None:
        """Issue ``acc (+)= a b`` as one group of ``wgmma``, without waiting for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not clear)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _scores(self, w, turn: Int32, n: Int32) -> cute.Tensor:
        rS = cute.make_rmem_tensor(w.qk_mma.partition_shape_C((self.c.tile_m, self.c.tile_n)), Float32)
        rQ, rK = w.tSrQ[None, None, None, w.q.slot(turn)], w.tSrK[None, None, None, w.k.slot(n)]
        self._multiply(w.qk_mma, rS, rQ, rK, clear=True)
        return rS

    def _accumulate(self, w, n: Int32) -> None:
        self._multiply(w.pv_mma, w.rO, w.rP, w.tOrV[None, None, None, w.v.slot(n)], clear=False)

    @cute.jit
    def first_block(self, w, turn: Int32, n: Int32, seq: Sequence, block: Int32, position: Int32):
        """Scores and probabilities of a tile's first block; its product with V follows in the next step."""
        w.k.wait(n)
        rS = self._scores(w, turn, n)
        w.rO.fill(0.0)
        w.scales.fill(1.0)
        warpgroup.wait_group(0)
        w.k.release(n)
        self._mask(w, rS, seq, block, position, "both")
        softmax.online(rS, w.top, w.total, w.scalars.scale_log2, first=True, exact=not self.c.normalize)
        softmax.pack_into(w.words, rS, self.c.dtype)
        if const_expr(self.c.padded):
            self._clear_rows(w, n, seq, block)

    @cute.jit
    def next_block(
        self, w, turn: Int32, n: Int32, seq: Sequence, block: Int32, position: Int32, edge: cutlass.Constexpr
    ):
        """Scores of block n beside the output product of block n - 1, then the probabilities of block n."""
        w.k.wait(n)
        self._await_turn(w)
        rS = self._scores(w, turn, n)
        if const_expr(self.c.late_rescale):
            softmax.rescale(w.rO, w.scales)
        w.v.wait(n - 1)
        self._accumulate(w, n - 1)
        self._pass_turn(w)
        warpgroup.wait_group(1)
        w.k.release(n)
        if const_expr(edge != ""):
            self._mask(w, rS, seq, block, position, edge)
        elif const_expr(self.c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        scales = softmax.online(rS, w.top, w.total, w.scalars.scale_log2, first=False, exact=not self.c.normalize)
        # ptxas moves most exponentials behind this wait, among the multiplications of the output, and that is best:
        # keeping them before it (a branch here does) cost 8 % at D 128, 2 x 8192 on an H200.
        warpgroup.wait_group(0)
        w.v.release(n - 1)
        if const_expr(self.c.late_rescale):
            w.scales[0], w.scales[1] = scales
        else:
            softmax.rescale(w.rO, scales)
        softmax.pack_into(w.words, rS, self.c.dtype)
        if const_expr(self.c.padded and edge != ""):
            self._clear_rows(w, n, seq, block)

    def last_product(self, w, n: Int32) -> None:
        if const_expr(self.c.late_rescale):
            softmax.rescale(w.rO, w.scales)
        w.v.wait(n)
        self._accumulate(w, n)
        warpgroup.wait_group(0)
        w.v.release(n)

    def _await_consumers(self) -> None:
        cute.arch.barrier(barrier_id=int(Barrier.ALL), number_of_threads=WARPGROUP * self.c.consumers)

    @cute.jit
    def _clear_rows(self, w, n: Int32, seq: Sequence, block: Int32):
        """Write 0 over the rows of V's block at which nobody looks, before the tensor cores read them.

        All consumers share the work and wait: none may read what another has yet to write, though it be zeros.
        """
        c = self.c
        low, high = block * c.tile_n, (block + 1) * c.tile_n
        unseen = outside(c, seq, w.scalars)
        if unseen.meets(low, high):
            w.v.wait(n)
            slot = w.v.slot(n)
            zeros = cute.make_rmem_tensor(8, c.dtype)
            zeros.fill(0.0)
            chunks = c.dim_v // 8
            threads = WARPGROUP * c.consumers
            for i in cutlass.range(cute.arch.thread_idx()[0] - WARPGROUP, c.tile_n * chunks, threads, unroll=1):
                key = low + i // chunks
                if unseen.holds(key):
                    cute.autovec_copy(zeros, cute.local_tile(w.sV[i // chunks, None, slot], (8,), (i % chunks,)))
            cute.arch.fence_view_async_shared()
            self._await_consumers()
