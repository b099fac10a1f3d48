"""Product of few tokens with a weight of 16 bits by ``mma.sync``: a CTA has 16 rows of the weight and all tokens.

    all warps   L2 prefetch of where the CTA's rows begin -> wait for the launch before
    each warp   every so many steps over K: 16 bytes of two rows and of each token a lane -> mma.sync, float32
    all warps   sums of the warps through shared memory -> bias -> out

Weights are operand A and tokens the columns. A quad of lanes has 32 numbers of a row in a step, 8 a lane, and both
operands are read so: K is multiplied in another order, and nothing is staged. The first weights are on their way to the
L2 before the launch before this one has ended; only x is that launch's, and loads wait.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, fake, pdl
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm

from .few import CHUNK, FEW_ROWS, FEW_STEP, FewConfig

_LINE = 64  # numbers in 128 bytes
_AHEAD = 8  # lines of a row that are prefetched


@dsl_user_op
def _prefetch(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch a line of device memory into the L2, where stores of kernels that are still running reach it."""
    asm(None, [Int64(source)], "prefetch.global.L2 [$0];", memory=True, loc=loc, ip=ip)


class FewGemm:
    def __init__(self, config: FewConfig, dtype: Any):
        self.c, self.dtype, self.threads = config, dtype, 32 * config.warps

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, K)
        mWeight: cute.Tensor,  # (N, K)
        mBias: cute.Tensor | None,  # (N,)
        mOut: cute.Tensor,  # (T, N), contiguous
        stream: cuda.CUstream,
    ):
        tiles = (Int32(mWeight.shape[0]) + (FEW_ROWS - 1)) // FEW_ROWS
        self.kernel(mX, mWeight, mBias, mOut).launch(
            grid=(tiles, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=pdl.use()
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mWeight: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor):
        c = self.c
        first = cute.arch.block_idx()[0] * FEW_ROWS
        sSum = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((4, 32, c.groups, c.warps)), 16)
        self.prefetch(mWeight, first)
        pdl.launch_dependents()
        pdl.wait()
        rSum = self.multiply(mX, mWeight, first)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for n in cutlass.range_constexpr(c.groups):
            for i in cutlass.range_constexpr(4):
                sSum[i, lane, n, warp] = rSum[i, n]
        cute.arch.barrier()
        self.store(sSum, mBias, mOut, first)

    @cute.jit
    def prefetch(self, mWeight: cute.Tensor, first: Int32):
        """The first lines of this CTA's rows."""
        lines = cutlass.min((Int32(mWeight.shape[1]) + (_LINE - 1)) // _LINE, Int32(_AHEAD))
        for n in cutlass.range(cute.arch.thread_idx()[0], FEW_ROWS * lines, self.threads, unroll=1):
            row = cutlass.min(first + n // lines, Int32(mWeight.shape[0]) - 1)
            at = Int64(row) * mWeight.stride[0] + (n % lines) * _LINE
            _prefetch(mWeight.iterator.toint() + at * 2)

    @cute.jit
    def multiply(self, mX: cute.Tensor, mWeight: cute.Tensor, first: Int32) -> cute.Tensor:
        """This warp's share of the sums: four of a lane, for each group of 8 tokens."""
        c, lane = self.c, cute.arch.lane_idx()
        steps = Int32(mX.shape[1]) // FEW_STEP
        # Past the end the last row again, whose results are not stored.
        rows = [cutlass.min(first + lane // 4 + 8 * i, Int32(mWeight.shape[0]) - 1) for i in range(2)]
        tokens = [cutlass.min(lane // 4 + 8 * n, Int32(mX.shape[0]) - 1) for n in range(c.groups)]
        positions = [(mWeight, row) for row in rows] + [(mX, token) for token in tokens]
        sources = [m.iterator + (Int64(row) * m.stride[0] + lane % 4 * CHUNK) for m, row in positions]
        rSum = cute.make_rmem_tensor(cute.make_layout((4, c.groups)), Float32)
        rSum.fill(0.0)
        for s in cutlass.range(cute.arch.warp_idx(), steps, c.warps * c.ahead, unroll=1):
            parts = [copies.fragments(2 + c.groups, CHUNK, self.dtype) for _ in range(c.ahead)]
            for i in cutlass.range_constexpr(c.ahead):
                for part in parts[i]:
                    part.fill(0)
                if s + i * c.warps < steps:
                    for part, source in zip(parts[i], sources, strict=True):
                        copies.load(source + (s + i * c.warps) * FEW_STEP, part)
            for i in cutlass.range_constexpr(c.ahead):
                left, right, *given = (cute.recast_tensor(part, Int32) for part in parts[i])
                for k in cutlass.range_constexpr(0, CHUNK // 2, 2):
                    rows_k = (left[k], right[k], left[k + 1], right[k + 1])
                    for n in cutlass.range_constexpr(c.groups):
                        pair = (given[n][k], given[n][k + 1])
                        new = op.mma_m16n8k16(self.dtype, rows_k, pair, [rSum[x, n] for x in range(4)])
                        for x in cutlass.range_constexpr(4):
                            rSum[x, n] = new[x]
        return rSum

    @cute.jit
    def store(self, sSum: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor, first: Int32):
        """A thread has results of a token and a row, whose parts all warps have."""
        c = self.c
        for at in cutlass.range(cute.arch.thread_idx()[0], 8 * c.groups * FEW_ROWS, self.threads, unroll=1):
            token, row = at // FEW_ROWS, at % FEW_ROWS
            if (token < mOut.shape[0]) & (first + row < mOut.shape[1]):
                i, lane = row // 8 * 2 + token % 2, row % 8 * 4 + token % 8 // 2
                total = Float32(0)
                for warp in cutlass.range_constexpr(c.warps):
                    total += sSum[i, lane, token // 8, warp]
                if const_expr(mBias is not None):
                    total += copies.scalar(mBias.iterator + (first + row)).to(Float32)
                mOut[token, first + row] = total.to(mOut.element_type)


def trace(arch: str, dtype: str, bias: bool, config: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """``dtype`` of the operands and the result; ``bias``: whether there is one."""
    c, k, rows = FewConfig(*config), fake.dim(FEW_STEP), fake.dim()
    arguments = [
        fake.tensor(dtype, (None, k)),
        fake.tensor(dtype, (rows, k)),
        fake.tensor(dtype, (rows,), align=2) if bias else None,
        fake.tensor(dtype, (None, rows), align=2),
        fake.stream(),
    ]
    return FewGemm(c, fake.dtype(dtype)), arguments
