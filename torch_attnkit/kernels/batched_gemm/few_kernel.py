"""Product of few tokens with a weight of 16 bits by ``mma.sync``: a CTA has 8 or 16 rows of the weight and all tokens.

    all warps   L2 prefetch of where the CTA's rows begin -> wait for the launch before
    each warp   every so many steps over K: 16 bytes of its rows and of each token a lane -> mma.sync, float32; a step's
                registers are filled for the step ``ahead`` of it as soon as it is multiplied
    all warps   sums of the warps through shared memory -> bias -> out

Weights are operand A and tokens the columns. A quad of lanes has a chunk of 32 numbers of a row, 8 a lane, and both
operands are read so: K is multiplied in another order, and nothing is staged. Operand A is 16 rows, or 8 rows with two
chunks each (``parts``): then its upper half is multiplied with the tokens' first chunk, its lower half with their
second, and of either product the other half is not used. A sum has one order of K, by chunks modulo ``parts * warps``,
whatever the number of tokens. The first weights are on their way to the L2 before the launch before this one has ended;
only x is that launch's, and loads wait.
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

from .few import FEW_CHUNK, VECTOR, FewConfig

_LINE = 64  # numbers in 128 bytes
_LINES = 8  # of a row that are prefetched


@dsl_user_op
def _prefetch(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch a line of device memory into the L2, where stores of kernels that are still running reach it."""
    asm(None, [Int64(source)], "prefetch.global.L2 [$0];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def _load_if(source: Int64, valid: Int32, no_allocate: bool, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """16 aligned bytes; ``valid`` 0 reads nothing and gives zeros. ``no_allocate``: past the L1."""
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    cache = ".L1::no_allocate" if no_allocate else ""
    text = f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {zeros}@p ld.global{cache}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
    return asm([Int32] * 4, [Int64(source), Int32(valid)], text, memory=True, loc=loc, ip=ip)


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
        tiles = (Int32(mWeight.shape[0]) + (self.c.rows - 1)) // self.c.rows
        self.kernel(mX, mWeight, mBias, mOut).launch(
            grid=(tiles, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=pdl.use()
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mWeight: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor):
        c = self.c
        first = cute.arch.block_idx()[0] * c.rows
        sSum = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((4, 32, c.groups, c.warps)), 16)
        self.prefetch(mWeight, first)
        pdl.launch_dependents()
        pdl.wait()
        rSum = self.multiply(mX, mWeight, first)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for n in cutlass.range_constexpr(c.groups):
            for i in cutlass.range_constexpr(4):
                sSum[i, lane, n, warp] = rSum[i, n, i // 2 * (c.parts - 1)]
        cute.arch.barrier()
        self.store(sSum, mBias, mOut, first)

    @cute.jit
    def prefetch(self, mWeight: cute.Tensor, first: Int32):
        """The first lines of this CTA's rows."""
        lines = cutlass.min((Int32(mWeight.shape[1]) + (_LINE - 1)) // _LINE, Int32(_LINES))
        for n in cutlass.range(cute.arch.thread_idx()[0], self.c.rows * lines, self.threads, unroll=1):
            row = cutlass.min(first + n // lines, Int32(mWeight.shape[0]) - 1)
            at = Int64(row) * mWeight.stride[0] + (n % lines) * _LINE
            _prefetch(mWeight.iterator.toint() + at * 2)

    @cute.jit
    def multiply(self, mX: cute.Tensor, mWeight: cute.Tensor, first: Int32) -> cute.Tensor:
        """This warp's share of the sums: four of a lane, for each group of 8 tokens and each part of a step."""
        c, lane = self.c, cute.arch.lane_idx()
        chunks = Int32(mX.shape[1]) // FEW_CHUNK
        # Past the end the last row again, whose results are not stored.
        rows = [
            cutlass.min(first + lane // 4 + 8 * (i if c.parts == 1 else 0), Int32(mWeight.shape[0]) - 1)
            for i in range(2)
        ]
        tokens = [cutlass.min(lane // 4 + 8 * n, Int32(mX.shape[0]) - 1) for n in range(c.groups)]
        sources = [(mWeight, row, i % c.parts) for i, row in enumerate(rows)]
        sources += [(mX, token, part) for part in range(c.parts) for token in tokens]
        addrs = [
            (m.iterator.toint() + (Int64(row) * m.stride[0] + part * FEW_CHUNK + lane % 4 * VECTOR) * 2, part)
            for m, row, part in sources
        ]
        rSum = cute.make_rmem_tensor(cute.make_layout((4, c.groups, c.parts)), Float32)
        rSum.fill(0.0)
        flight = [[cute.make_rmem_tensor(4, Int32) for _ in addrs] for _ in range(c.ahead)]
        warp = cute.arch.warp_idx()
        for i in cutlass.range_constexpr(c.ahead):
            self._load(flight[i], addrs, warp + i * c.warps, chunks)
        for s in cutlass.range(warp, (chunks + c.parts - 1) // c.parts, c.warps * c.ahead, unroll=1):
            for i in cutlass.range_constexpr(c.ahead):
                self._multiply_step(rSum, flight[i])
                self._load(flight[i], addrs, s + (i + c.ahead) * c.warps, chunks)
        return rSum

    def _load(self, fragments: list[cute.Tensor], addrs: list[Any], step: Int32, chunks: Int32) -> None:
        """A step's 16 bytes from each of ``addrs``, zeros behind the end of K."""
        for n, (rF, (addr, part)) in enumerate(zip(fragments, addrs, strict=True)):
            inside = step * self.c.parts + part < chunks
            valid = cutlass.select_(inside, Int32(1), Int32(0))
            words = _load_if(addr + Int64(step) * (self.c.parts * FEW_CHUNK * 2), valid, no_allocate=n < 2)
            for j in range(4):
                rF[j] = words[j]

    def _multiply_step(self, rSum: cute.Tensor, fragments: list[cute.Tensor]) -> None:
        c = self.c
        left, right, *given = fragments
        for k in range(0, VECTOR // 2, 2):
            rows_k = (left[k], right[k], left[k + 1], right[k + 1])
            for part in range(c.parts):
                for n in range(c.groups):
                    rX = given[part * c.groups + n]
                    new = op.mma_m16n8k16(self.dtype, rows_k, (rX[k], rX[k + 1]), [rSum[x, n, part] for x in range(4)])
                    for x in range(4):
                        rSum[x, n, part] = new[x]

    @cute.jit
    def store(self, sSum: cute.Tensor, mBias: cute.Tensor | None, mOut: cute.Tensor, first: Int32):
        """A thread has results of a token and a row, whose parts all warps have."""
        c = self.c
        for at in cutlass.range(cute.arch.thread_idx()[0], 8 * c.groups * c.rows, self.threads, unroll=1):
            token, row = at // c.rows, at % c.rows
            if (token < mOut.shape[0]) & (first + row < mOut.shape[1]):
                i, lane = row // 8 * 2 + token % 2, row % 8 * 4 + token % 8 // 2
                total = Float32(0)
                for warp in cutlass.range_constexpr(c.warps):
                    for part in cutlass.range_constexpr(c.parts):
                        total += sSum[i + 2 * part, lane, token // 8, warp]
                if const_expr(mBias is not None):
                    total += copies.scalar(mBias.iterator + (first + row)).to(Float32)
                mOut[token, first + row] = total.to(mOut.element_type)


def trace(arch: str, dtype: str, bias: bool, config: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """``dtype`` of the operands and the result; ``bias``: whether there is one."""
    c, k, rows = FewConfig(*config), fake.dim(FEW_CHUNK), fake.dim()
    arguments = [
        fake.tensor(dtype, (None, k)),
        fake.tensor(dtype, (rows, k)),
        fake.tensor(dtype, (rows,), align=2) if bias else None,
        fake.tensor(dtype, (None, rows), align=2),
        fake.stream(),
    ]
    return FewGemm(c, fake.dtype(dtype)), arguments
