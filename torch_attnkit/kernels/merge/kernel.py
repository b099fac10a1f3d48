"""merge_partials: ``out = sum_p exp(lse_p - lse) out_p`` with ``lse = log sum_p exp(lse_p)`` over P partials of a row.

A row is one (r, h), and ``lanes`` threads share its Dv elements; CTAs have 128 or 512 threads, no roles and no ring.

    ``_Few``    all partials of a row in registers: every load is issued before the LSEs are reduced, each thread
                computes the weights for itself
    ``_Many``   ``splits`` groups of threads take a row's partials alternately, ``ahead`` in flight each; the first are
                on their way while the P LSEs are reduced; sums meet in shared memory behind one CTA barrier

An LSE of +inf is read as -inf, and such a partial is not looked at. Bound by device memory, or by latency of few rows.
"""

from __future__ import annotations

import operator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.warp_ops import LOG2_E

from .plan import Config


class _Merge:
    """What both kernels share: launch, weights, and the store."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def __call__(
        self,
        mPart: cute.Tensor,  # (P, R, H, Dv)
        mLsePart: cute.Tensor,  # (P, R, H)
        mSink: cute.Tensor | None,  # (H,)
        mRowSum: cute.Tensor | None,  # (P, R, H)
        mOut: cute.Tensor,  # (R, H, Dv), contiguous
        mLse: cute.Tensor,  # (R, H), contiguous
        stream: cuda.CUstream,
    ):
        rows = mPart.shape[1] * mPart.shape[2]
        blocks = (rows + (self.c.rows - 1)) // self.c.rows
        self.kernel(mPart, mLsePart, mSink, mRowSum, mOut, mLse).launch(
            grid=(blocks, 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    def lse(self, pointer: Any):
        """The lse of a partial: -inf if it saw nothing, for which FlashAttention-2 writes +inf."""
        lse = copies.scalar(pointer)
        return cutlass.select_(lse == Float32.inf, -Float32.inf, lse)

    @cute.jit
    def weight(self, lse: Any, base: Any):
        """exp(lse - base), exactly 0 for -inf."""
        return cute.math.exp2((lse - base) * LOG2_E, fastmath=True)

    def base(self, lse_max: Any):
        """What is subtracted of every lse: the largest, or 0 where no partial saw anything."""
        return cutlass.select_(lse_max == -Float32.inf, Float32(0), lse_max)

    @cute.jit
    def add(self, rAcc: list[Any], rPart: list[Any], lse: Any, weight: Any, gSum: Any):
        """Add a weighted partial, unless it saw nothing: then it may hold anything."""
        vectors = self.c.vectors
        if lse != -Float32.inf:
            if const_expr(gSum is not None):
                weight = weight / copies.scalar(gSum)
            for v in cutlass.range_constexpr(vectors):
                rAcc[v].store(rAcc[v].load() + rPart[v].load().to(Float32) * weight)

    @cute.jit
    def finish(
        self, rAcc: list[Any], base: Any, weight_sum: Any, mSink: Any, mOut: Any, mLse: Any, r: Any, h: Any,
        col: list[Any], lane: Any,
    ):  # fmt: skip
        """Divide by the sum, which the sink joins here, round and store."""
        vectors, width = self.c.vectors, self.c.width
        Dv = mOut.shape[2]
        factor = Float32(0)
        if weight_sum != 0:
            denominator = weight_sum
            if const_expr(mSink is not None):
                denominator += cute.math.exp2((mSink[h] - base) * LOG2_E, fastmath=True)
            factor = 1.0 / denominator
        out = mOut.iterator + (Int64(r) * mOut.stride[0] + Int64(h) * mOut.stride[1])
        for v in cutlass.range_constexpr(vectors):
            if col[v] < Dv:
                rOut = cute.make_rmem_tensor(width, mOut.element_type)
                rOut.store((rAcc[v].load() * factor).to(mOut.element_type))
                copies.store(rOut, out + col[v])
        if lane == 0:
            lse = -Float32.inf
            if weight_sum != 0:
                lse = base + cute.math.log(weight_sum)
            mLse[r, h] = lse


class _Few(_Merge):
    """As many partials as the configuration says, all in registers."""

    @cute.kernel
    def kernel(
        self,
        mPart: cute.Tensor,
        mLsePart: cute.Tensor,
        mSink: cute.Tensor | None,
        mRowSum: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, heads, Dv = tid % c.lanes, mPart.shape[2], mPart.shape[3]
        row = block * c.rows + tid // c.lanes
        r, h = row // heads, row % heads
        col = [(v * c.lanes + lane) * c.width for v in range(c.vectors)]
        if r < mPart.shape[1]:
            part = mPart.iterator + (Int64(r) * mPart.stride[1] + Int64(h) * mPart.stride[2])
            gLse = mLsePart.iterator + (Int64(r) * mLsePart.stride[1] + h)
            lse = [self.lse(gLse + p * mLsePart.stride[0]) for p in range(c.parts)]
            rPart = [copies.fragments(c.vectors, c.width, mPart.element_type) for _ in range(c.parts)]
            for p in cutlass.range_constexpr(c.parts):
                for v in cutlass.range_constexpr(c.vectors):
                    if col[v] < Dv:
                        copies.load(part + (p * mPart.stride[0] + col[v]), rPart[p][v], c.evict_first)
            lse_max = lse[0]
            for p in cutlass.range_constexpr(1, c.parts):
                lse_max = cute.arch.fmax(lse_max, lse[p])
            base = self.base(lse_max)
            weights = [self.weight(lse[p], base) for p in range(c.parts)]
            weight_sum = Float32(0)
            rAcc = copies.fragments(c.vectors, c.width, Float32)
            for v in cutlass.range_constexpr(c.vectors):
                rAcc[v].fill(0)
            for p in cutlass.range_constexpr(c.parts):
                weight_sum += weights[p]
                gSum = None
                if const_expr(mRowSum is not None):
                    gSum = mRowSum.iterator + (p * mRowSum.stride[0] + Int64(r) * mRowSum.stride[1] + h)
                self.add(rAcc, rPart[p], lse[p], weights[p], gSum)
            self.finish(rAcc, base, weight_sum, mSink, mOut, mLse, r, h, col, lane)


class _Many(_Merge):
    """Any number of partials."""

    @cute.kernel
    def kernel(
        self,
        mPart: cute.Tensor,
        mLsePart: cute.Tensor,
        mSink: cute.Tensor | None,
        mRowSum: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        parts, heads, Dv = mPart.shape[0], mPart.shape[2], mPart.shape[3]
        lane, group = tid % c.lanes, tid // c.lanes
        split, slot = group % c.splits, group // c.splits
        rows = mPart.shape[1] * heads
        row = block * c.rows + slot
        inside = row < rows
        at = cutlass.min(row, rows - 1)  # threads past the end read the last row and write nothing
        r, h = at // heads, at % heads
        part_step, lse_step = mPart.stride[0], mLsePart.stride[0]
        part = mPart.iterator + (Int64(r) * mPart.stride[1] + Int64(h) * mPart.stride[2])
        gLse = mLsePart.iterator + (Int64(r) * mLsePart.stride[1] + h)

        col = [(v * c.lanes + lane) * c.width for v in range(c.vectors)]
        rPart = [copies.fragments(c.vectors, c.width, mPart.element_type) for _ in range(c.ahead)]
        rAcc = copies.fragments(c.vectors, c.width, Float32)
        for v in cutlass.range_constexpr(c.vectors):
            rAcc[v].fill(0)
        stride = const_expr(c.splits * c.ahead)
        self.fetch(part, part_step, split, parts, col, Dv, rPart)

        # Every thread of the row learns the largest lse and the sum beside it.
        lse_max = -Float32.inf
        for p in cutlass.range(lane % c.lse_lanes, parts, c.lse_lanes):
            lse_max = cute.arch.fmax(lse_max, self.lse(gLse + Int64(p) * lse_step))
        lse_max = cute.arch.warp_reduction(lse_max, cute.arch.fmax, threads_in_group=c.lse_lanes)
        base = self.base(lse_max)
        weight_sum = Float32(0)
        for p in cutlass.range(lane % c.lse_lanes, parts, c.lse_lanes):
            weight_sum += self.weight(self.lse(gLse + Int64(p) * lse_step), base)
        weight_sum = cute.arch.warp_reduction(weight_sum, operator.add, threads_in_group=c.lse_lanes)

        for p0 in cutlass.range(split, parts, stride):
            for i in cutlass.range_constexpr(c.ahead):
                p = p0 + i * c.splits
                if p < parts:
                    lse = self.lse(gLse + Int64(p) * lse_step)
                    gSum = None
                    if const_expr(mRowSum is not None):
                        gSum = mRowSum.iterator + (Int64(p) * mRowSum.stride[0] + Int64(r) * mRowSum.stride[1] + h)
                    self.add(rAcc, rPart[i], lse, self.weight(lse, base), gSum)
            self.fetch(part, part_step, p0 + stride, parts, col, Dv, rPart)

        if const_expr(c.splits > 1):
            self.across_splits(rAcc, split, slot, lane)
        if inside and split == 0:
            self.finish(rAcc, base, weight_sum, mSink, mOut, mLse, r, h, col, lane)

    @cute.jit
    def fetch(self, part: Any, step: Any, first: Any, parts: Any, col: list[Any], Dv: Any, rPart: list[list[Any]]):
        """Start loading the next ``ahead`` partials of this split."""
        c = self.c
        for i in cutlass.range_constexpr(c.ahead):
            p = first + i * c.splits
            for v in cutlass.range_constexpr(c.vectors):
                if p < parts and col[v] < Dv:
                    copies.load(part + (Int64(p) * step + col[v]), rPart[i][v], c.evict_first)

    @cute.jit
    def across_splits(self, rAcc: list[Any], split: Any, slot: Any, lane: Any):
        """Add the splits' sums into those of the first."""
        c = self.c
        smem = cutlass.memory.SmemAllocator()
        shape = (c.width, c.lanes, c.vectors, c.splits, c.rows)
        sAcc = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        for v in cutlass.range_constexpr(c.vectors):
            cute.autovec_copy(rAcc[v], sAcc[None, lane, v, split, slot])
        cute.arch.barrier()
        if split == 0:
            rOther = cute.make_rmem_tensor(c.width, Float32)
            for v in cutlass.range_constexpr(c.vectors):
                for s in cutlass.range_constexpr(1, c.splits):
                    cute.autovec_copy(sAcc[None, lane, v, s, slot], rOther)
                    rAcc[v].store(rAcc[v].load() + rOther.load())


def trace(
    arch: str, dtypes: tuple[str, str], sink: bool, row_sum: bool, config: tuple[int, ...]
) -> tuple[Any, list[Any]]:
    """``dtypes`` of the partials and of out."""
    c = Config(*config)
    P, R, H, Dv = (fake.dim32() for _ in range(4))  # rows are divided by H; strides stay 64-bit

    def tensor(name: str, *shape: Any) -> Any:
        return fake.tensor(name, shape, align=min(16, c.width * fake.dtype(name).width // 8))

    arguments = [
        tensor(dtypes[0], P, R, H, Dv),
        fake.tensor("f32", (P, R, H), align=4),
        fake.tensor("f32", (H,), align=4) if sink else None,
        fake.tensor("f32", (P, R, H), align=4) if row_sum else None,
        tensor(dtypes[1], R, H, Dv),
        fake.tensor("f32", (R, H), align=4),
        fake.stream(),
    ]
    return (_Few(c) if c.parts else _Many(c)), arguments
