"""Device side of the products of groups of FP4 numbers, in two launches.

    prepare   o's codes and scales -> bf16 numbers, in the order of decoding; weights' scales -> bf16 factors
    products  ring of cp.async: codes, factors, tokens -> codes decoded in registers -> mma.sync, float32 -> out

A CTA has 64 rows of weights x ``columns`` tokens. A warp has 16 rows of one half of every stage, 128 numbers: weights
are the left side of ``mma.m16n8k16`` and tokens its columns. Both halves' sums meet in shared memory. What decoding
gives is ``cuda/fp4_weights.py``, the order of tokens' numbers ``grouped_gemm/sm90/rows.py``. Chunks of 16 bytes are
permuted within a row by the row's number. Rows past the end, and chunks past K, are zeros in shared memory.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import fake, fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import LOWERED, both, both_of_two, decode, factors_of_e4m3, factors_of_e8m0
from torch_attnkit.kernels.grouped_gemm.sm90.mainloop import load_words, row_of, store_floats
from torch_attnkit.kernels.grouped_gemm.sm90.rows import permuted

from .plan import FP4_ROWS, FP4_STAGE, Fp4Config

_CODE_BYTES = FP4_STAGE // 2  # of a row of weights in a stage
_TOKEN_BYTES = FP4_STAGE * 2
_ROW_WARPS = FP4_ROWS // 16
_THREADS = 2 * _ROW_WARPS * 32
_BLOCKS = 64  # of a group, that prepare
_TWO_TO_126 = 0x7E807E80  # in bf16, twice: by which codes become their numbers


def _place(kind: Any, address: Int64) -> cute.Tensor:
    """A number of device memory."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))


class _Fp4GroupProducts:
    def __init__(self, config: Fp4Config, swizzled: bool, divisors: tuple[bool, bool]):
        self.c, self.swizzled = config, swizzled
        self.divisors = divisors  # which of the global scales there are
        self.groups = config.columns // 8  # of tokens

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (T, G, K/2)
        mOScale: cute.Tensor,  # (G, T, K/block), or each group's in the 128x4 layout
        mOGlobal: cute.Tensor,  # (1)
        mWeight: cute.Tensor,  # (G, N, K/2)
        mWeightScale: cute.Tensor,  # (G, N, K/block), or each group's in the 128x4 layout
        mWeightGlobal: cute.Tensor,  # (1)
        mX: cute.Tensor,  # (T, G, K rounded up to stages), contiguous
        mFactor: cute.Tensor,  # (G, N, blocks of that), contiguous
        mOut: cute.Tensor,  # (T, G, N), contiguous
        blocks: Int32,  # of a row
        stream: cuda.CUstream,
    ):
        c, (tokens, groups, n) = self.c, mOut.shape
        self.prepare(mO, mOScale, mWeightScale, mX, mFactor, blocks).launch(
            grid=(_BLOCKS, groups, 1), block=(_THREADS, 1, 1), stream=stream
        )
        tiles = [(size + (each - 1)) // each for size, each in ((n, FP4_ROWS), (tokens, c.columns))]
        self.products(mX, mFactor, mWeight, mOGlobal, mWeightGlobal, mOut).launch(
            grid=(*tiles, groups), block=(_THREADS, 1, 1), smem=c.stages * c.stage_bytes + 1024, stream=stream
        )

    @cute.kernel
    def prepare(
        self, mO: cute.Tensor, mOScale: cute.Tensor, mWeightScale: cute.Tensor, mX: cute.Tensor, mFactor: cute.Tensor,
        blocks: Int32,
    ):  # fmt: skip
        """A thread has eight numbers of o at a time, then four scales of weights."""
        block, group, _ = cute.arch.block_idx()
        first, step = block * _THREADS + cute.arch.thread_idx()[0], const_expr(_BLOCKS * _THREADS)
        words = Int32(mX.shape[2]) // 8
        for unit in cutlass.range(first, Int32(mX.shape[0]) * words, step, unroll=1):
            self.numbers(mO, mOScale, mX, group, unit // words, unit % words, blocks)
        quads = Int32(mFactor.shape[2]) // 4
        for unit in cutlass.range(first, Int32(mFactor.shape[1]) * quads, step, unroll=1):
            self.factors(mWeightScale, mFactor, group, unit // quads, unit % quads * 4, blocks)

    @cute.jit
    def numbers(
        self, mO: cute.Tensor, mOScale: cute.Tensor, mX: cute.Tensor, group: Int32, token: Int32, word: Int32,
        blocks: Int32,
    ):  # fmt: skip
        """Eight numbers of a token: codes times scales, which bf16 holds; zeros behind K."""
        codes, byte = Uint32(0), Int32(0)
        block = word // (self.c.block // 8)
        if block < blocks:
            row = mO.iterator.toint() + Int64(token) * mO.stride[0] + Int64(group) * mO.stride[1]
            codes = Uint32(_place(Uint32, row + word * 4)[0])
            byte = self.scale(mOScale, group, token, block)
        scale = fp4.e4m3_values(byte)[0] if const_expr(self.c.format == "nvfp4") else fp4.ue8m0_value(byte)
        row = mX.iterator.toint() + (Int64(token) * mX.stride[0] + Int64(group) * mX.stride[1]) * 2
        pairs = decode(codes, Uint32(_TWO_TO_126))
        for i in cutlass.range_constexpr(4):
            low, high = (fp4.times(x, scale) for x in fp4.floats(BFloat16, Int32(pairs[i])))
            _place(Int32, row + permuted(word * 8 + i) * 2)[0] = op.pack(BFloat16, low, high)

    @cute.jit
    def factors(self, mScale: cute.Tensor, mFactor: cute.Tensor, group: Int32, row: Int32, block: Int32, blocks: Int32):
        """Four factors of a row of weights."""
        bytes_ = Uint32(0)
        for i in cutlass.range_constexpr(4):
            if block + i < blocks:
                bytes_ = bytes_ | (Uint32(self.scale(mScale, group, row, block + i)) << (8 * i))
        pairs = factors_of_e4m3(bytes_) if const_expr(self.c.format == "nvfp4") else factors_of_e8m0(bytes_)
        at = Int64(group) * mFactor.stride[0] + Int64(row) * mFactor.stride[1] + block
        for i in cutlass.range_constexpr(2):
            _place(Uint32, mFactor.iterator.toint() + at * 2 + 4 * i)[0] = pairs[i]

    def scale(self, mScale: cute.Tensor, group: Int32, row: Int32, block: Int32) -> Int32:
        """A scale's byte."""
        at = mScale.iterator.toint() + Int64(group) * mScale.stride[0]
        if self.swizzled:
            tile = Int64(row // 128) * 128 * mScale.shape[2] + block // 4 * 512
            at += tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        else:
            at += Int64(row) * mScale.stride[1] + block
        # A byte is extended without sign only to an unsigned number.
        return Int32(Uint32(_place(Uint8, at)[0]))

    @cute.kernel
    def products(
        self, mX: cute.Tensor, mFactor: cute.Tensor, mWeight: cute.Tensor, mOGlobal: cute.Tensor,
        mWeightGlobal: cute.Tensor, mOut: cute.Tensor,
    ):  # fmt: skip
        c, stages = self.c, const_expr(self.c.stages)
        n_block, t_block, group = cute.arch.block_idx()
        first_t, first_n = t_block * c.columns, n_block * FP4_ROWS
        ring = cutlass.memory.SmemAllocator().allocate(c.stages * c.stage_bytes, 1024).toint()
        count = Int32(mX.shape[2]) // FP4_STAGE
        for s in cutlass.range_constexpr(stages - 1):
            if s < count:
                self.load(mX, mFactor, mWeight, group, first_t, first_n, Int32(s), ring + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
        rSum = cute.make_rmem_tensor(cute.make_layout((4, self.groups)), Float32)
        rSum.fill(0.0)
        for tile in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.barrier()  # this tile is there for all, and nobody reads the one before any more
            ahead = tile + (stages - 1)
            if ahead < count:
                stage = ring + ahead % stages * c.stage_bytes
                self.load(mX, mFactor, mWeight, group, first_t, first_n, ahead, stage)
            cute.arch.cp_async_commit_group()
            self.multiply(rSum, ring + tile % stages * c.stage_bytes)
        cute.arch.cp_async_wait_group(0)
        self.join(rSum, ring)
        if cute.arch.warp_idx() < _ROW_WARPS:
            self.store(rSum, mOGlobal, mWeightGlobal, mOut, group, first_t, first_n)

    @cute.jit
    def load(
        self, mX: cute.Tensor, mFactor: cute.Tensor, mWeight: cute.Tensor, group: Int32, first_t: Int32,
        first_n: Int32, tile: Int32, stage: Int32,
    ):  # fmt: skip
        """Start the copies of a stage."""
        c = self.c
        rows, tokens = Int32(mWeight.shape[1]) - first_n, Int32(mX.shape[0]) - first_t
        codes = mWeight.iterator.toint() + Int64(group) * mWeight.stride[0] + Int64(first_n) * mWeight.stride[1]
        factors = mFactor.iterator.toint()
        factors += (Int64(group) * mFactor.stride[0] + Int64(first_n) * mFactor.stride[1]) * 2
        x = mX.iterator.toint() + (Int64(first_t) * mX.stride[0] + Int64(group) * mX.stride[1]) * 2
        there = (Int32(mWeight.shape[2]) - tile * _CODE_BYTES) // 16  # chunks up to K
        parts = (
            (codes, mWeight.stride[1], FP4_ROWS, rows, _CODE_BYTES, there, c.codes_at),
            (factors, mFactor.stride[1] * 2, FP4_ROWS, rows, c.factor_bytes, c.factor_bytes // 16, c.factors_at),
            (x, mX.stride[0] * 2, c.columns, tokens, _TOKEN_BYTES, _TOKEN_BYTES // 16, c.tokens_at),
        )
        for source, step, most, some, row_bytes, chunks, at in parts:
            self.copy(stage + at, source + Int64(tile) * row_bytes, step, most, some, row_bytes // 16, chunks)

    @cute.jit
    def copy(
        self, target: Int32, source: Int64, step: Int64, rows: cutlass.Constexpr, rows_there: Int32,
        chunks: cutlass.Constexpr, chunks_there: Int32,
    ):  # fmt: skip
        """Start the copy of rows of a stage. A thread has a chunk of every so many."""
        permuted_by = const_expr(7 if chunks >= 8 else 0)
        for i in cutlass.range_constexpr(-(-rows * chunks // _THREADS)):
            unit = cute.arch.thread_idx()[0] + i * _THREADS
            row, chunk = unit // chunks, unit % chunks
            if unit < rows * chunks:
                inside = (row < rows_there) & (chunk < chunks_there)
                at = cutlass.select_(inside, Int64(row) * step + chunk * 16, Int64(0))
                place = target + (row * chunks + (chunk ^ (row & permuted_by))) * 16
                op.copy_16_async(place, source + at, cutlass.select_(inside, Int32(16), Int32(0)))

    @cute.jit
    def multiply(self, rSum: cute.Tensor, stage: Int32):
        """Add this warp's part of the products of a stage: rows that are 8 apart, 32 numbers of each a lane."""
        c = self.c
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row, quarter, half = row_of(lane), lane % 4, warp // _ROW_WARPS
        first = warp % _ROW_WARPS * 16 + row
        at = stage + c.codes_at + first * _CODE_BYTES + ((half * 4 + quarter) ^ row) * 16
        factor_at = stage + c.factors_at + first * c.factor_bytes + (half * 4 + quarter) * (c.factor_bytes // 8)
        codes = [load_words(at + 8 * r * _CODE_BYTES, 4) for r in range(2)]
        factors = [self.pair(factor_at + 8 * r * c.factor_bytes) for r in range(2)]
        tokens = stage + c.tokens_at + lane % 8 * _TOKEN_BYTES
        for word in cutlass.range_constexpr(4):
            a, b = (decode(codes[r][word], factors[r][word // 2]) for r in range(2))
            chunk = (half * 16 + word * 4 + lane // 8) ^ (lane % 8)
            for group in cutlass.range_constexpr(self.groups):
                rB = op.ldmatrix_x4(tokens + group * 8 * _TOKEN_BYTES + chunk * 16)
                for i in cutlass.range_constexpr(0, 4, 2):
                    left, right = (a[i], b[i], a[i + 1], b[i + 1]), rB[i : i + 2]
                    new = op.mma_m16n8k16(BFloat16, left, right, [rSum[x, group] for x in range(4)])
                    for x in cutlass.range_constexpr(4):
                        rSum[x, group] = new[x]

    def pair(self, address: Int32) -> tuple[Uint32, Uint32]:
        """The factors of a lane's first and last 16 numbers of a row."""
        if self.c.format == "nvfp4":
            return both_of_two(load_words(address, 1)[0])
        one = both(Uint32(load_words(address, 1, Uint16)[0]))
        return one, one

    @cute.jit
    def join(self, rSum: cute.Tensor, ring: Int32):
        """The sums of both halves of the stages, into the first half's warps."""
        warp = cute.arch.warp_idx()
        place = ring + (warp % _ROW_WARPS * 32 + cute.arch.lane_idx()) * 16
        apart = const_expr(_ROW_WARPS * 32 * 16)
        cute.arch.barrier()  # nobody reads the last tile any more
        if warp >= _ROW_WARPS:
            for group in cutlass.range_constexpr(self.groups):
                store_floats(place + group * apart, [rSum[x, group] for x in range(4)])
        cute.arch.barrier()
        if warp < _ROW_WARPS:
            for group in cutlass.range_constexpr(self.groups):
                more = load_words(place + group * apart, 4, Float32)
                for x in cutlass.range_constexpr(4):
                    rSum[x, group] = rSum[x, group] + more[x]

    @cute.jit
    def store(
        self, rSum: cute.Tensor, mOGlobal: cute.Tensor, mWeightGlobal: cute.Tensor, mOut: cute.Tensor, group: Int32,
        first_t: Int32, first_n: Int32,
    ):  # fmt: skip
        """Take back what weights were lowered by, divide by global scales, round, and store those that are results."""
        lane = cute.arch.lane_idx()
        first_n += cute.arch.warp_idx() * 16 + row_of(lane)
        first_t += lane % 4 * 2
        for g in cutlass.range_constexpr(self.groups):
            for x in cutlass.range_constexpr(4):
                token, n = first_t + g * 8 + x % 2, first_n + x // 2 * 8
                if token < mOut.shape[0] and n < mOut.shape[2]:
                    result = rSum[x, g] * Float32(2.0 ** LOWERED[self.c.format])
                    for given, divisor in zip(self.divisors, (mOGlobal, mWeightGlobal), strict=True):
                        result = fp4.divide(result, divisor[0]) if const_expr(given) else result
                    out = mOut.iterator + (Int64(token) * mOut.shape[1] + group) * mOut.shape[2] + n
                    cute.make_tensor(out, cute.make_layout(1))[0] = result.to(mOut.element_type)


def trace(
    arch: str, *, format: str, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], columns: int
) -> tuple[Any, list[Any]]:
    """``divisors``: which of o and the weights have a global scale; ``columns`` as in ``Fp4Config``."""
    codes = fake.tensor("u8", (None, None, fake.dim(16)), (fake.dim(16), fake.dim(16), 1), align=16)
    weights = fake.tensor("u8", (None, None, fake.dim(16)), (fake.dim(16), fake.dim(16), 1), align=16)
    scales = [fake.tensor("u8", (None, None, None), align=1) for _ in range(2)]
    divisor = [fake.tensor("f32", (1,), (1,), align=4) for _ in range(2)]
    x, factors = (
        fake.tensor("bf16", (None, None, fake.dim(div)), (fake.dim(div), fake.dim(div), 1), align=16)
        for div in (FP4_STAGE, 8)
    )
    out = fake.tensor(out_dtype, (None, None, None), align=2)
    arguments = [codes, scales[0], divisor[0], weights, scales[1], divisor[1], x, factors, out, Int32(1), fake.stream()]
    return _Fp4GroupProducts(Fp4Config(format, columns), swizzled, divisors), arguments
