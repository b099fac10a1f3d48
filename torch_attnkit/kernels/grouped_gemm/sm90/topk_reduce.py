"""Top-k reduction behind the second GEMM by its own CTAs: sums a token's results in the order of its choices.

CTAs wait for all results, then share the tokens. Spin only if every CTA has started; otherwise exit, since waiting CTAs
may need this SM. The last CTA to start always sees all started, so someone reduces.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Tensors

_IN_FLIGHT = 8  # of a token's choices that a warp has on their way
_EACH = 4  # features of a lane
_SLABS = 4  # of a token's features, a warp's share each
_CONSUMERS = 7  # named barrier: warpgroups have those before it


class TopkReduce:
    """``warps`` of every CTA. Counters are those of the sort, zero again when this launch starts; there are at least
    four."""

    _BEGUN, _DONE, _SHARING, _THROUGH = range(4)

    def __init__(self, warps: int):
        self.warps = warps

    def share(self, memory: Any) -> cute.Tensor:
        """Shared memory for what a CTA finds: its rank among the CTAs that reduce, and how many they are."""
        return memory.allocate_tensor(Int32, cute.make_layout(2), 16)

    def _counter(self, tensors: Tensors, which: int) -> Int64:
        return tensors.count.iterator.toint() + 4 * which

    def begin(self, tensors: Tensors) -> None:
        """By one thread of every CTA."""
        op.add_acq_rel(self._counter(tensors, self._BEGUN), Int32(1))

    @cute.jit
    def run(self, tensors: Tensors, sShare: cute.Tensor, warp: Int32):
        """By all of the warps, behind a CTA's last tile."""
        self._sync()  # results of all are there, for this block
        if warp == 0:
            self._agree(tensors, sShare)
        self._sync()
        rank, blocks = sShare[0], sShare[1]
        if rank >= 0:
            units = Int32(tensors.out.shape[0]) * _SLABS
            for unit in cutlass.range(rank * self.warps + warp, units, blocks * self.warps, unroll=1):
                self._add_up(tensors, unit // _SLABS, unit % _SLABS)

    def _sync(self) -> None:
        cute.arch.barrier(barrier_id=_CONSUMERS, number_of_threads=32 * self.warps)

    @cute.jit
    def _agree(self, tensors: Tensors, sShare: cute.Tensor):
        """By one thread: wait for all results, if every CTA has started."""
        blocks = cute.arch.grid_dim()[0]
        if cute.arch.lane_idx() == 0:
            rank = Int32(-1)
            sharing = Int32(0)
            if memory_ops.load_acquire(self._counter(tensors, self._BEGUN)) == blocks:
                rank = op.add_acq_rel(self._counter(tensors, self._SHARING), Int32(1))
            op.add_acq_rel(self._counter(tensors, self._DONE), Int32(1))
            if rank >= 0:
                while memory_ops.load_acquire(self._counter(tensors, self._DONE)) < blocks:
                    pass
                sharing = memory_ops.load_acquire(self._counter(tensors, self._SHARING))  # who shares came before
                if op.add_acq_rel(self._counter(tensors, self._THROUGH), Int32(1)) == sharing - 1:
                    for i in cutlass.range_constexpr(4):
                        tensors.count[0, i] = Int32(0)
            sShare[0] = rank
            sShare[1] = sharing

    @cute.jit
    def _add_up(self, tensors: Tensors, token: Int32, slab: Int32):
        """A part of a token's features: a lane has four of every 128."""
        lane, top_k = cute.arch.lane_idx(), Int32(tensors.indices.shape[1])
        features = Int32(tensors.out.shape[1])
        each = (features + _SLABS * 32 * _EACH - 1) // (_SLABS * 32 * _EACH) * (32 * _EACH)
        end = cutlass.min((slab + 1) * each, features)
        first = self._choices(tensors, token, Int32(0), top_k)
        for feature in cutlass.range(slab * each + lane * _EACH, end, 32 * _EACH, unroll=2):
            sums = self._added(tensors, [Float32(0.0)] * _EACH, first, feature)
            for k in cutlass.range(_IN_FLIGHT, top_k, _IN_FLIGHT, unroll=1):
                sums = self._added(tensors, sums, self._choices(tensors, token, k, top_k), feature)
            pairs = [op.pack(tensors.out.element_type, *sums[i : i + 2]) for i in (0, 2)]
            to = Int64(token) * tensors.out.stride[0] + feature
            op.store_2_pairs(tensors.out.iterator.toint() + to * 2, *pairs)

    def _choices(self, tensors: Tensors, token: Int32, k: Int32, top_k: Int32) -> list[tuple[Int32, Float32]]:
        """Rows and weights of a token's choices from k on; behind its last, and of no expert, the row is -1."""
        found = []
        for i in range(_IN_FLIGHT):
            at = cutlass.min(k + i, top_k - 1)
            row = cutlass.select_(k + i < top_k, tensors.order[token * top_k + at], Int32(-1))
            found.append((row, tensors.weights[token, at]))
        return found

    def _added(
        self, tensors: Tensors, sums: list[Float32], choices: list[tuple[Int32, Float32]], feature: Int32
    ) -> list[Float32]:
        for row, weight in choices:
            valid = cutlass.select_(row >= 0, Int32(1), Int32(0))
            at = tensors.partial.iterator.toint() + (Int64(row) * tensors.partial.stride[0] + feature) * 4
            values = memory_ops.load_4_floats_if(at, valid)
            sums = [s + cutlass.select_(row >= 0, v * weight, Float32(0.0)) for s, v in zip(sums, values, strict=True)]
        return sums
