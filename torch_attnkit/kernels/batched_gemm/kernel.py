"""Batched GEMM of 16 bits by ``mma.sync``, for any rows and architecture: a CTA has tokens x n outputs of a group.

    ring of cp.async: rows of x and of the weights, K_TILE elements a stage -> ldmatrix -> mma.sync, float32 -> out

Both operands are K-major, so both are read as ``mma.m16n8k16`` wants them, x as operand A. Chunks of 16 bytes are
swizzled within a row by the row's number, so that eight rows lie in different banks. Rows past the end, and chunks past
K, are zeros in shared memory; their outputs are not stored.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda import warp_ops as op

from .epilogue import StoreEpilogue
from .plan import CHUNK, K_TILE, Config

_ROW = K_TILE * 2  # bytes
_CHUNKS = K_TILE // CHUNK


class MmaGemm:
    def __init__(self, config: Config, dtype: Any, even: bool):
        self.c, self.dtype, self.epilogue = config, dtype, StoreEpilogue(config, even)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, G, K)
        mWeight: cute.Tensor,  # (G, N, K)
        mOut: cute.Tensor,  # (T, G, N), contiguous
        stream: cuda.CUstream,
    ):
        c = self.c
        tiles = [(size + (each - 1)) // each for size, each in ((mOut.shape[2], c.n), (mOut.shape[0], c.tokens))]
        self.kernel(mX, mWeight, mOut).launch(
            grid=(*tiles, mOut.shape[1]), block=(c.threads, 1, 1), smem=c.stages * c.stage_bytes + 1024, stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mWeight: cute.Tensor, mOut: cute.Tensor):
        c, stages = self.c, const_expr(self.c.stages)
        n_block, t_block, group = cute.arch.block_idx()
        first_t, first_n = t_block * c.tokens, n_block * c.n
        ring = cutlass.memory.SmemAllocator().allocate(c.stages * c.stage_bytes, 1024).toint()
        count = (Int32(mX.shape[2]) + (K_TILE - 1)) // K_TILE
        for s in cutlass.range_constexpr(stages - 1):
            if s < count:
                self.load(mX, mWeight, group, first_t, first_n, Int32(s), ring + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
        rSum = cute.make_rmem_tensor(cute.make_layout((4, self.c.n_tiles, self.c.m_tiles)), Float32)
        rSum.fill(0.0)
        for tile in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.barrier()  # this tile is visible to all, and the previous one is no longer read
            ahead = tile + (stages - 1)
            if ahead < count:
                self.load(mX, mWeight, group, first_t, first_n, ahead, ring + ahead % stages * c.stage_bytes)
            cute.arch.cp_async_commit_group()
            self.multiply(rSum, ring + tile % stages * c.stage_bytes)
        cute.arch.cp_async_wait_group(0)
        self.epilogue.run(rSum, mOut, group, first_t, first_n)

    @cute.jit
    def load(
        self, mX: cute.Tensor, mWeight: cute.Tensor, group: Int32, first_t: Int32, first_n: Int32, tile: Int32,
        stage: Int32,
    ):  # fmt: skip
        """Start the copy of K tile ``tile``: a thread has one chunk of every so many rows."""
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        step = const_expr(c.threads // _CHUNKS)
        chunk, k = tid % _CHUNKS, (tile * _CHUNKS + tid % _CHUNKS) * CHUNK
        x = mX.iterator.toint() + (Int64(group) * mX.stride[1] + k) * 2
        weight = mWeight.iterator.toint() + (Int64(group) * mWeight.stride[0] + k) * 2
        parts = ((x, mX, 0, first_t, c.tokens, 0), (weight, mWeight, 1, first_n, c.n, c.tokens))
        for base, tensor, axis, first, rows, down in parts:
            for i in cutlass.range_constexpr(rows // step):
                row = tid // _CHUNKS + i * step
                inside = (first + row < tensor.shape[axis]) & (k < tensor.shape[2])
                at = cutlass.select_(inside, Int64(first + row) * tensor.stride[axis] * 2, Int64(0))
                target = stage + (down + row) * _ROW + (chunk ^ (row & 7)) * 16
                op.copy_16_async(target, base + at, cutlass.select_(inside, Int32(16), Int32(0)))

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32):
        """Add this warp's part of the products of a stage."""
        c = self.c
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        # Lane l addresses row l % 8 of the 8 x 8 tile l // 8. Of x the tiles go down the tokens first, of the weights
        # along K.
        x_row = warp % c.warps[0] * (self.c.m_tiles * 16) + ((lane >> 3) & 1) * 8 + (lane & 7)
        w_row = warp // c.warps[0] * (self.c.n_tiles * 8) + (lane >> 4) * 8 + (lane & 7)
        x_at, w_at = stage + x_row * _ROW, stage + (c.tokens + w_row) * _ROW
        for k in cutlass.range_constexpr(K_TILE // 16):
            x_chunk = ((2 * k + (lane >> 4)) ^ (lane & 7)) * 16
            w_chunk = ((2 * k + ((lane >> 3) & 1)) ^ (lane & 7)) * 16
            rX = [op.ldmatrix_x4(x_at + m * 16 * _ROW + x_chunk) for m in range(self.c.m_tiles)]
            rW = [op.ldmatrix_x4(w_at + n * 16 * _ROW + w_chunk) for n in range(self.c.n_tiles // 2)]
            for m in cutlass.range_constexpr(self.c.m_tiles):
                for n in cutlass.range_constexpr(self.c.n_tiles):
                    pair = rW[n // 2][2 * (n % 2) : 2 * (n % 2) + 2]
                    new = op.mma_m16n8k16(self.dtype, rX[m], pair, [rSum[i, n, m] for i in range(4)])
                    for i in cutlass.range_constexpr(4):
                        rSum[i, n, m] = new[i]


def trace(arch: str, dtypes: tuple[str, str], even: bool, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``dtypes`` of the operands and of the result."""
    k = fake.dim(CHUNK)
    arguments = [
        fake.tensor(dtypes[0], (None, None, k), (fake.dim(CHUNK), fake.dim(CHUNK), 1), align=16),
        fake.tensor(dtypes[0], (None, None, k), (fake.dim(CHUNK), fake.dim(CHUNK), 1), align=16),
        fake.tensor(dtypes[1], (None, None, None), align=4 if even else 2),
        fake.stream(),
    ]
    return MmaGemm(Config(*config), fake.dtype(dtypes[0]), even), arguments
