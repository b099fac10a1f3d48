"""Device side of gated_rmsnorm's backward: rows in one launch, the sum over rows in a second.

With u = y rstd, gate = silu(z), h = grad w gate: dy = rstd (h - u mean(h u)), dz = grad w u silu'(z), and each row's
share of dw is grad u gate. mean(h u) is rstd mean(h y), so that both sums of a row form in one pass. A block works on
every ``blocks``-th group of rows; a thread has the same columns in all of them and adds up its shares of dw, a block
adds up those of its rows side by side in shared memory. All of that has a fixed order, and so have the sums.
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
_SUM_WARPS = 8  # of a block of the second launch, which has a column a lane


@cute.jit
def gates(z: Float32):
    """silu(z) and its slope sigmoid(z) (1 + z sigmoid(-z)), to a few roundings for every z."""
    x = cute.arch.fmax(cute.arch.fmin(z, Float32(_FLAT)), Float32(-_FLAT))
    power = x * Float32(-LOG2_E)
    rest = fma(x, Float32(-LOG2_E), -power) + x * Float32(-_LOG2_E_REST)
    grown = exp2(power) * fma(rest, Float32(LN_2), Float32(1.0))
    s = cute.arch.rcp_approx(grown + 1.0)
    other = cute.arch.fmin(grown * s, Float32(1.0))  # sigmoid(-z); infinity times 0, which is no number, is 1 here
    return z * s, s * fma(z, other, Float32(1.0))


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
        mG: cute.Tensor,  # (..., N)
        mY: cute.Tensor,  # (..., N)
        mZ: cute.Tensor,  # (..., N)
        mW: cute.Tensor,  # (N,)
        mDY: cute.Tensor,  # (..., N), contiguous
        mDZ: cute.Tensor,  # (..., N), contiguous
        mSum: cute.Tensor,  # (blocks, N) shares of dw
        n: Int32,
        axes: tuple,  # of each batch axis after merging: size, steps of grad, y and z
        eps: Float32,
        stream: cuda.CUstream,
    ):
        rows = Int64(1)
        for size in axes[::4]:
            rows *= size
        self.kernel(mG, mY, mZ, mW, mDY, mDZ, mSum, n, axes, eps, Int32(rows)).launch(
            grid=(Int32(mSum.shape[0]), 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    def offsets(self, row: Int32, axes: tuple) -> list[Int64]:
        """Elements before a row of grad, y and z: its number in mixed radix, times the strides."""
        before, rest = [Int64(0)] * 3, Int64(row)
        for i in range(len(axes) - 4, -1, -4):
            at = rest if i == 0 else rest % axes[i]
            before = [b + at * axes[i + 1 + j] for j, b in enumerate(before)]
            rest = rest // axes[i] if i else rest
        return before

    @cute.jit
    def products(self, rG: Any, rZ: Any, rW: Any):
        """Of one vector, in float32: the gradients of u, of z over u, and of w over u."""
        g, z = rG.load().to(Float32), rZ.load().to(Float32)
        rGate, rSlope = copies.fragments(2, self.c.width, Float32)
        rGate.store(z)
        for i in cutlass.range_constexpr(self.c.width):
            rGate[i], rSlope[i] = gates(rGate[i])
        gate, weighted = rGate.load(), g * rW.load().to(Float32)
        return weighted * gate, weighted * rSlope.load(), g * gate

    @cute.jit
    def centred(self, h: Any, u: Any, mean: Float32, n: Int32, eps: Float32, rstd: Float32):
        """h - u mean(h u) of one vector. Of a row of one element that is h (1 - u^2), of which rounding would leave
        nothing: it is h eps rstd^2."""
        left = h - u * mean
        if const_expr(self.c.width == 1 and self.c.vectors == 1):
            rLeft = cute.make_rmem_tensor(1, Float32)
            rLeft.store(left)
            if n == 1:
                rLeft.store(h * (eps * rstd * rstd))
            left = rLeft.load()
        return left


class _Resident(_Rows):
    """A row is read once, into registers."""

    @cute.kernel
    def kernel(
        self,
        mG: cute.Tensor,
        mY: cute.Tensor,
        mZ: cute.Tensor,
        mW: cute.Tensor,
        mDY: cute.Tensor,
        mDZ: cute.Tensor,
        mSum: cute.Tensor,
        n: Int32,
        axes: tuple,
        eps: Float32,
        rows: Int32,
    ):
        c = self.c
        even, vectors = const_expr(self.even), const_expr(c.vectors)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, slot = tid % c.lanes, tid // c.lanes
        squares, dots = (reduce.RowSum(c.threads, c.lanes) for _ in range(2))
        squares.setup()
        dots.setup()
        inverse = Float32(1.0) / Float32(n)

        col = [(v * c.lanes + lane) * c.width for v in range(vectors)]
        rG, rY, rZ, rW = (copies.fragments(vectors, c.width, m.element_type) for m in (mG, mY, mZ, mW))
        rH, rD, rP, rShare = (copies.fragments(vectors, c.width, Float32) for _ in range(4))
        for v in cutlass.range_constexpr(vectors):
            rShare[v].fill(0)
            rW[v].fill(0)
            if even or col[v] < n:
                copies.load(mW.iterator + col[v], rW[v])

        for group in cutlass.range(block, (rows + (c.rows - 1)) // c.rows, blocks):
            row = group * c.rows + slot
            before = self.offsets(row, axes)
            for v in cutlass.range_constexpr(vectors):
                for r in (rG[v], rY[v], rZ[v]):
                    r.fill(0)
                if row < rows and (even or col[v] < n):
                    for m, r, at in zip((mG, mY, mZ), (rG[v], rY[v], rZ[v]), before, strict=True):
                        copies.load(m.iterator + at + col[v], r)
            square, dot = Float32(0), Float32(0)
            for v in cutlass.range_constexpr(vectors):
                y = rY[v].load().to(Float32)
                h, d, p = self.products(rG[v], rZ[v], rW[v])
                rH[v].store(h)
                rD[v].store(d)
                rP[v].store(p)
                square += (y * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
                dot += (h * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            rstd = cute.math.rsqrt(squares(square) * inverse + eps, fastmath=True)
            mean = dots(dot) * inverse * rstd
            start = Int64(row) * n
            for v in cutlass.range_constexpr(vectors):
                u = rY[v].load().to(Float32) * rstd
                rShare[v].store(rShare[v].load() + rP[v].load() * u)
                if row < rows and (even or col[v] < n):
                    rDY, rDZ = (cute.make_rmem_tensor(c.width, m.element_type) for m in (mDY, mDZ))
                    rDY.store((self.centred(rH[v].load(), u, mean, n, eps, rstd) * rstd).to(mDY.element_type))
                    rDZ.store((rD[v].load() * u).to(mDZ.element_type))
                    copies.store(rDY, mDY.iterator + start + col[v])
                    copies.store(rDZ, mDZ.iterator + start + col[v])

        sums = mSum.iterator + Int64(block) * n
        if const_expr(c.rows == 1):
            for v in cutlass.range_constexpr(vectors):
                if even or col[v] < n:
                    copies.store(rShare[v], sums + col[v])
        else:
            self.across_slots(rShare, col, slot, tid, sums, n)

    @cute.jit
    def across_slots(self, rShare: Any, col: Any, slot: Int32, tid: Int32, sums: Any, n: Int32):
        """The shares of the rows that the block had side by side, added up in their order."""
        c = self.c
        columns = c.lanes * c.vectors * c.width
        smem = cutlass.memory.SmemAllocator()
        sShare = smem.allocate_tensor(Float32, cute.make_layout((columns, c.rows)), byte_alignment=16)
        for v in cutlass.range_constexpr(c.vectors):
            for i in cutlass.range_constexpr(c.width):
                sShare[col[v] + i, slot] = rShare[v][i]
        cute.arch.barrier()
        for at in cutlass.range(tid, cutlass.min(n, columns), c.threads):
            total = Float32(0)
            for r in cutlass.range_constexpr(c.rows):
                total += sShare[at, r]
            cute.make_tensor(sums + at, cute.make_layout(1))[0] = total


class _Stream(_Rows):
    """Rows too long for registers: one pass for the sums, a second for the result. A block's shares stand in memory,
    where each belongs to one thread."""

    @cute.kernel
    def kernel(
        self,
        mG: cute.Tensor,
        mY: cute.Tensor,
        mZ: cute.Tensor,
        mW: cute.Tensor,
        mDY: cute.Tensor,
        mDZ: cute.Tensor,
        mSum: cute.Tensor,
        n: Int32,
        axes: tuple,
        eps: Float32,
        rows: Int32,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        squares, dots = (reduce.RowSum(c.threads, c.threads) for _ in range(2))
        squares.setup()
        dots.setup()
        inverse = Float32(1.0) / Float32(n)
        rG, rY, rZ, rW, rDY, rDZ = (cute.make_rmem_tensor(c.width, m.element_type) for m in (mG, mY, mZ, mW, mDY, mDZ))
        rShare = cute.make_rmem_tensor(c.width, Float32)
        sums = mSum.iterator + Int64(block) * n
        for row in cutlass.range(block, rows, blocks):
            starts = [m.iterator + at for m, at in zip((mG, mY, mZ), self.offsets(row, axes), strict=True)]
            square, dot = Float32(0), Float32(0)
            for col in cutlass.range(tid * c.width, n, c.threads * c.width):
                for start, r in zip((*starts, mW.iterator), (rG, rY, rZ, rW), strict=True):
                    copies.load(start + col, r)
                y = rY.load().to(Float32)
                h, _, _ = self.products(rG, rZ, rW)
                square += (y * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
                dot += (h * y).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            rstd = cute.math.rsqrt(squares(square) * inverse + eps, fastmath=True)
            mean = dots(dot) * inverse * rstd
            for col in cutlass.range(tid * c.width, n, c.threads * c.width):
                for start, r in zip((*starts, mW.iterator), (rG, rY, rZ, rW), strict=True):
                    copies.load(start + col, r)
                u = rY.load().to(Float32) * rstd
                h, d, p = self.products(rG, rZ, rW)
                rDY.store((self.centred(h, u, mean, n, eps, rstd) * rstd).to(mDY.element_type))
                rDZ.store((d * u).to(mDZ.element_type))
                copies.store(rDY, mDY.iterator + Int64(row) * n + col)
                copies.store(rDZ, mDZ.iterator + Int64(row) * n + col)
                rShare.fill(0)
                if row != block:
                    copies.load(sums + col, rShare)
                rShare.store(rShare.load() + p * u)
                copies.store(rShare, sums + col)


class _Sums:
    """dw: the shares of all blocks, a column a lane, every eighth block a warp."""

    @cute.jit
    def __call__(self, mSum: cute.Tensor, mDW: cute.Tensor, stream: cuda.CUstream):  # (blocks, N), (N,)
        columns = Int32(mDW.shape[0])
        self.kernel(mSum, mDW, columns).launch(
            grid=((columns + 31) // 32, 1, 1), block=(32 * _SUM_WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mSum: cute.Tensor, mDW: cute.Tensor, n: Int32):
        block, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        smem = cutlass.memory.SmemAllocator()
        sTotal = smem.allocate_tensor(Float32, cute.make_layout((32, _SUM_WARPS)), byte_alignment=16)
        col = block * 32 + lane
        total = Float32(0)
        if col < n:
            for part in cutlass.range(warp, Int32(mSum.shape[0]), _SUM_WARPS, unroll=4):
                total += mSum[part, col]
        sTotal[lane, warp] = total
        cute.arch.barrier()
        if warp == 0 and col < n:
            whole = Float32(0)
            for w in cutlass.range_constexpr(_SUM_WARPS):
                whole += sTotal[lane, w]
            mDW[col] = whole.to(mDW.element_type)


def trace(
    arch: str, dtypes: tuple[str, str, str], rank: int, groups: int, config: tuple[int, ...], even: bool
) -> tuple[Any, list[Any]]:
    """``dtypes`` of y and dy, of grad, z and dz, and of w; ``groups`` is the number of batch axes after merging."""
    c = Config(*config)
    y, z, w = dtypes
    kernel = _Resident(c, even) if c.vectors else _Stream(c, even)

    def tensor(name: str, axes: int) -> Any:
        return fake.tensor(name, (None,) * axes, align=min(c.width * fake.dtype(name).width // 8, 16))

    tensors = [tensor(z, rank), tensor(y, rank), tensor(z, rank), tensor(w, 1), tensor(y, rank), tensor(z, rank)]
    return kernel, [*tensors, tensor("f32", 2), Int32(0), (Int64(0),) * (4 * groups), Float32(0), fake.stream()]


def trace_sums(arch: str, dtype: str) -> tuple[Any, list[Any]]:
    return _Sums(), [fake.tensor("f32", (None, None), align=4), fake.tensor(dtype, (None,), align=2), fake.stream()]
