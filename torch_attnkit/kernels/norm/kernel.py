"""Device side of gated_rmsnorm: ``out = w * y * rsqrt(mean(y^2) + eps) * silu(z)``, one pass over device memory.

A row belongs to ``lanes`` neighbouring threads, of one block or of a cluster of them. Each thread holds ``vectors``
vectors of ``width`` elements of y and z in registers; all loads are issued before the first use, so what limits the
kernel is device memory. The sum of squares goes through shuffles, then shared memory, then the cluster's shared memory.
Rows too long for registers are read a second time (``_Stream``).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, reduce
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2, fma

from .plan import Config

_LOG2_E_REST = 1.92596299e-08  # of log2(e), beyond the float32 next to it
_FLAT = 200.0  # from here on the sigmoid is 0 or 1 in float32


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x), to a few roundings for every x: that of x * log2(e), which e^-x would show x times as large, is
    added to the power afterwards."""
    x = cute.arch.fmax(cute.arch.fmin(x, Float32(_FLAT)), Float32(-_FLAT))
    power = x * Float32(-LOG2_E)
    rest = fma(x, Float32(-LOG2_E), -power) + x * Float32(-_LOG2_E_REST)
    grown = exp2(power) * fma(rest, Float32(LN_2), Float32(1.0))
    return cute.arch.rcp_approx(grown + 1.0)


class _Rows:
    """The plumbing that both kernels share: the launch, where a row starts, and the arithmetic of one vector.

    Abstract: it has no kernel of its own, which a part would have to be handed with all these arguments.
    """

    def __init__(self, config: Config, even: bool):
        self.c = config
        self.even = even  # every vector of a row is whole and inside it, so no column is checked

    @cute.jit
    def __call__(
        self,
        mY: cute.Tensor,  # (..., N)
        mZ: cute.Tensor,  # (..., N)
        mW: cute.Tensor,  # (N,)
        mO: cute.Tensor,  # (..., N), contiguous
        n: Int32,
        sizes: tuple,  # of the batch axes after merging
        y_steps: tuple,  # their strides
        z_steps: tuple,
        eps: Float32,
        inverse: Float32,  # 1 / n
        stream: cuda.CUstream,
    ):
        c = self.c
        rows = Int32(1)
        for size in sizes:
            rows *= size
        blocks = (rows + (c.rows - 1)) // c.rows
        self.kernel(mY, mZ, mW, mO, rows, n, sizes, y_steps, z_steps, eps, inverse).launch(
            grid=(blocks * c.cluster, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
        )

    def offset(self, row: Int32, sizes: tuple, steps: tuple) -> Int64:
        """Elements before a row: its number in mixed radix, times the strides."""
        before = Int64(0)
        for size, step in zip(reversed(sizes[1:]), reversed(steps[1:]), strict=True):
            before += Int64(row % size) * step
            row = row // size
        return before + Int64(row) * steps[0]

    @cute.jit
    def gated(self, rY: Any, rZ: Any, rW: Any):
        """w * y * silu(z) of one vector, in float32."""
        z = rZ.load().to(Float32)
        rGate = cute.make_rmem_tensor(self.c.width, Float32)
        rGate.store(z)
        for i in cutlass.range_constexpr(self.c.width):
            rGate[i] = sigmoid(rGate[i])
        return rY.load().to(Float32) * rW.load().to(Float32) * (z * rGate.load())


class _Resident(_Rows):
    """A row is read once: while the sum forms, so does w * y * silu(z), and only that outlives it."""

    @cute.kernel
    def kernel(
        self,
        mY: cute.Tensor,
        mZ: cute.Tensor,
        mW: cute.Tensor,
        mO: cute.Tensor,
        rows: Int32,
        n: Int32,
        sizes: tuple,
        y_steps: tuple,
        z_steps: tuple,
        eps: Float32,
        inverse: Float32,
    ):
        c = self.c
        even, vectors = const_expr(self.even), const_expr(c.vectors)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = block % c.cluster
        lane, slot = tid % c.lanes, tid // c.lanes
        row = (block // c.cluster) * c.rows + slot
        reducer = reduce.RowSum(c.threads, c.lanes, c.cluster)
        reducer.setup()

        col = [((rank * vectors + v) * c.lanes + lane) * c.width for v in range(vectors)]
        rY, rZ, rW = (copies.fragments(vectors, c.width, m.element_type) for m in (mY, mZ, mW))
        y_row = mY.iterator + self.offset(row, sizes, y_steps)
        z_row = mZ.iterator + self.offset(row, sizes, z_steps)
        for v in cutlass.range_constexpr(vectors):
            if const_expr(not even):
                rY[v].fill(0)
                rZ[v].fill(0)
            if row < rows and (even or col[v] < n):
                copies.load(y_row + col[v], rY[v], c.evict_first)
                copies.load(z_row + col[v], rZ[v], c.evict_first)
        for v in cutlass.range_constexpr(vectors):
            if even or col[v] < n:
                copies.load(mW.iterator + col[v], rW[v])

        square = Float32(0)
        rGated = copies.fragments(vectors, c.width, Float32)
        for v in cutlass.range_constexpr(vectors):
            y = rY[v].load().to(Float32)
            square += (y * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            rGated[v].store(self.gated(rY[v], rZ[v], rW[v]))
        rstd = cute.math.rsqrt(reducer(square, rank) * inverse + eps, fastmath=True)

        out = mO.iterator + Int64(row) * n
        for v in cutlass.range_constexpr(vectors):
            if row < rows and (even or col[v] < n):
                rO = cute.make_rmem_tensor(c.width, mO.element_type)
                rO.store((rGated[v].load() * rstd).to(mO.element_type))
                copies.store(rO, out + col[v], c.evict_first)


class _Stream(_Rows):
    """Rows too long for registers: one pass for the sum, a second for the result."""

    @cute.kernel
    def kernel(
        self,
        mY: cute.Tensor,
        mZ: cute.Tensor,
        mW: cute.Tensor,
        mO: cute.Tensor,
        rows: Int32,
        n: Int32,
        sizes: tuple,
        y_steps: tuple,
        z_steps: tuple,
        eps: Float32,
        inverse: Float32,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        reducer = reduce.RowSum(c.threads, c.threads)
        reducer.setup()
        y_row = mY.iterator + self.offset(row, sizes, y_steps)
        z_row = mZ.iterator + self.offset(row, sizes, z_steps)
        out = mO.iterator + Int64(row) * n
        rY = cute.make_rmem_tensor(c.width, mY.element_type)
        square = Float32(0)
        for col in cutlass.range(tid * c.width, n, c.threads * c.width, unroll=4):
            copies.load(y_row + col, rY)
            y = rY.load().to(Float32)
            square += (y * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
        rstd = cute.math.rsqrt(reducer(square) * inverse + eps, fastmath=True)
        rZ = cute.make_rmem_tensor(c.width, mZ.element_type)
        rW = cute.make_rmem_tensor(c.width, mW.element_type)
        rO = cute.make_rmem_tensor(c.width, mO.element_type)
        for col in cutlass.range(tid * c.width, n, c.threads * c.width, unroll=2):
            copies.load(y_row + col, rY)
            copies.load(z_row + col, rZ)
            copies.load(mW.iterator + col, rW)
            rO.store((self.gated(rY, rZ, rW) * rstd).to(mO.element_type))
            copies.store(rO, out + col)


def trace(
    arch: str, dtypes: tuple[str, str, str], rank: int, groups: int, config: tuple[int, ...], even: bool
) -> tuple[Any, list[Any]]:
    """``dtypes`` of y, of z and out, and of w; ``groups`` is the number of batch axes after merging."""
    c = Config(*config)
    y, z, w = dtypes
    kernel = _Resident(c, even) if c.vectors else _Stream(c, even)

    def tensor(name: str, axes: int) -> Any:
        return fake.tensor(name, (None,) * axes, align=c.width * fake.dtype(name).width // 8)

    tensors = [tensor(y, rank), tensor(z, rank), tensor(w, 1), tensor(z, rank)]
    sizes, steps = (Int32(0),) * groups, (Int64(0),) * groups
    return kernel, [*tensors, Int32(0), sizes, steps, steps, Float32(0), Float32(0), fake.stream()]
