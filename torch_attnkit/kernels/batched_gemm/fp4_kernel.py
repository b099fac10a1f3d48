"""Batched GEMM of FP4 by ``mma.sync``, for any rows: a CTA has tokens x n outputs of a group.

    ring of cp.async   packed rows of x and of the weights, K_TILE elements a stage, and their scales: a commit
                       group a stage, waited for by cp.async.wait_group and one CTA barrier
    mainloop           sm80/mainloop_dequant.py or grouped_gemm/sm120/mainloop.py -> float32 sums
    epilogue           sums / global scales -> rounded -> out

A row of a stage is 64 bytes: chunks of 16 change their places with every second row, so that eight rows lie in
different banks. Scales lie behind all rows, those of a row side by side. Rows past the end, and chunks and scales past
K, are zeros in shared memory; outputs of such rows are not stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import fake, fp4
from torch_attnkit.cuda import warp_ops as op

from ..grouped_gemm.sm120.config import K_TILE, ROW_BYTES
from ..grouped_gemm.sm120.mainloop import BlockScaledMainloop
from .arguments import Coded, coded
from .epilogue import StoreEpilogue
from .plan import Fp4Config
from .sm80.mainloop_dequant import DequantMainloop

_CHUNK = 16  # bytes that a thread copies at once
_LANES = ROW_BYTES // _CHUNK  # threads that copy a row


class Source(NamedTuple):
    """What a thread copies of every stage: from where in the first, to where; how many bytes, 0 for a row that there is
    not."""

    address: Int64
    offset: Int32
    valid: Int32


class Fp4Gemm:
    """``swizzled``: scales are in the 128x4 layout; ``divisors``: which of x and the weights have a global scale;
    ``even``: two neighbouring results of a token are stored at once."""

    def __init__(self, config: Fp4Config, mainloop: Any, swizzled: bool, divisors: tuple[bool, bool], even: bool):
        self.c, self.mainloop, self.swizzled, self.divisors = config, mainloop, swizzled, divisors
        self.epilogue = StoreEpilogue(config, even)

    @cute.jit
    def __call__(
        self,
        x: Coded,
        weight: Coded,
        mXGlobal: cute.Tensor,  # (1)
        mWeightGlobal: cute.Tensor,  # (1)
        mOut: cute.Tensor,  # (T, G, N), contiguous
        stream: Any,
    ):
        c = self.c
        tiles = [(size + (each - 1)) // each for size, each in ((mOut.shape[2], c.n), (mOut.shape[0], c.tokens))]
        self.kernel(x, weight, mXGlobal, mWeightGlobal, mOut).launch(
            grid=(*tiles, mOut.shape[1]), block=(c.threads, 1, 1), smem=c.stages * c.stage_bytes + 1024, stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Coded, weight: Coded, mXGlobal: cute.Tensor, mWeightGlobal: cute.Tensor, mOut: cute.Tensor):
        c, stages = self.c, const_expr(self.c.stages)
        n_block, t_block, group = cute.arch.block_idx()
        first_t, first_n = t_block * c.tokens, n_block * c.n
        ring = cutlass.memory.SmemAllocator().allocate(c.stages * c.stage_bytes, 1024).toint()
        row_bytes = Int32(x.packed.shape[2])
        count = (row_bytes + (ROW_BYTES - 1)) // ROW_BYTES
        codes = self.code_sources(x, weight, group, first_t, first_n)
        scales = self.scale_source(x, weight, group, first_t, first_n)
        for s in cutlass.range(stages - 1, unroll=1):
            if s < count:
                self.load(codes, scales, row_bytes, s, ring + s * c.stage_bytes)
            cute.arch.cp_async_commit_group()
        rSum = cute.make_rmem_tensor(cute.make_layout((4, c.n_tiles, c.m_tiles)), Float32)
        rSum.fill(0.0)
        own = self.mainloop.offsets()
        for tile in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.barrier()  # this tile is visible to all, and the previous one is no longer read
            ahead = tile + (stages - 1)
            if ahead < count:
                self.load(codes, scales, row_bytes, ahead, ring + ahead % stages * c.stage_bytes)
            cute.arch.cp_async_commit_group()
            self.mainloop.multiply(rSum, ring + tile % stages * c.stage_bytes, own)
        cute.arch.cp_async_wait_group(0)
        self.divide(rSum, mXGlobal, mWeightGlobal)
        self.epilogue.run(rSum, mOut, group, first_t, first_n)

    @cute.jit
    def code_sources(self, x: Coded, weight: Coded, group: Int32, first_t: Int32, first_n: Int32) -> list[Source]:
        """A thread has one chunk of every so many rows, those of x first."""
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        step, found = const_expr(c.threads // _LANES), []
        for i in cutlass.range_constexpr(-(-c.stage_rows // step)):
            row = tid // _LANES + i * step
            of_x, at_x = self._row(x.packed, group, first_t + row)
            of_weight, at_weight = self._row(weight.packed, group, first_n + row - c.tokens)
            inside = cutlass.select_(row < c.tokens, of_x, of_weight & (row < c.stage_rows))
            at = Int64(cutlass.select_(row < c.tokens, at_x, at_weight)) + tid % _LANES * _CHUNK
            offset = row * ROW_BYTES + ((tid ^ (row >> 1)) % _LANES) * _CHUNK
            found.append(Source(at, offset, Int32(cutlass.select_(inside, Int32(_CHUNK), Int32(0)))))
        return found

    def _row(self, packed: cute.Tensor, group: Int32, row: Int32) -> tuple[Any, Int64]:
        """Whether there is this row, and its address, or that of the first."""
        inside = (row >= 0) & (row < packed.shape[1])
        row = Int64(cutlass.select_(inside, Int64(row), Int64(0)))
        return inside, packed.iterator.toint() + Int64(group) * packed.stride[0] + row * packed.stride[1]

    @cute.jit
    def scale_source(self, x: Coded, weight: Coded, group: Int32, first_t: Int32, first_n: Int32) -> Source:
        """A thread has the scales of a row, those of x first. ``valid``: how many a row has."""
        c = self.c
        row, _, _ = cute.arch.thread_idx()
        of_x, at_x = self._scales(x, group, first_t + row)
        of_weight, at_weight = self._scales(weight, group, first_n + row - c.tokens)
        inside = cutlass.select_(row < c.tokens, of_x, of_weight & (row < c.stage_rows))
        blocks = Int32(x.packed.shape[2]) * 2 // (K_TILE // c.scale_bytes)
        return Source(
            Int64(cutlass.select_(row < c.tokens, at_x, at_weight)),
            c.scales_at + row * c.scale_bytes,
            Int32(cutlass.select_(inside, blocks, Int32(0))),
        )

    def _scales(self, operand: Coded, group: Int32, row: Int32) -> tuple[Any, Int64]:
        """As ``_row``, of the row's scales."""
        scale = operand.scale
        inside, _ = self._row(operand.packed, group, row)
        if not self.swizzled:
            return inside, self._row(scale, group, row)[1]
        row = Int32(cutlass.select_(inside, row, Int32(0)))
        tile = Int64(row // 128) * 128 * scale.shape[2] + row % 32 * 16 + row % 128 // 32 * 4
        return inside, scale.iterator.toint() + Int64(group) * scale.stride[0] + tile

    @cute.jit
    def load(self, codes: list[Source], scales: Source, row_bytes: Int32, tile: Int32, stage: Int32):
        """Start the copies of K tile ``tile``."""
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        step, k = const_expr(c.threads // _LANES), tile * ROW_BYTES
        left = row_bytes - k - tid % _LANES * _CHUNK
        for i in cutlass.range_constexpr(len(codes)):
            source = codes[i]
            at, valid = self._part(source, Int64(k), source.valid, left)
            if const_expr((i + 1) * step <= c.stage_rows):
                op.copy_16_async(stage + source.offset, at, valid)
            elif tid // _LANES + i * step < c.stage_rows:
                op.copy_16_async(stage + source.offset, at, valid)
        if tid < c.stage_rows:
            words, apart = const_expr(c.scale_bytes // 4), const_expr(512 if self.swizzled else 4)
            for i in cutlass.range_constexpr(words):
                word = tile * words + i
                most = Int32(cutlass.select_(scales.valid > 0, Int32(4), Int32(0)))
                at, valid = self._part(scales, Int64(word) * apart, most, scales.valid - word * 4)
                op.copy_4_async(stage + scales.offset + i * 4, at, valid)

    def _part(self, source: Source, further: Int64, most: Int32, left: Int32) -> tuple[Int64, Int32]:
        """The address ``further`` on, and how many bytes of it there are; of ``left`` not above 0 none is read. A count
        that ptxas does not know to be none or all costs five instructions a copy, so whole rows do not ask."""
        if self.c.whole:
            return source.address + further, most
        valid = cutlass.max(cutlass.min(most, left), Int32(0))
        return source.address + Int64(cutlass.select_(valid > 0, further, Int64(0))), valid

    @cute.jit
    def divide(self, rSum: cute.Tensor, mXGlobal: cute.Tensor, mWeightGlobal: cute.Tensor):
        """Sums of what the mainloop multiplies to those of the numbers: by its power of two, and by global scales."""
        factors = [Float32(self.mainloop.output_scale), Float32(1)]
        for i, divisor in enumerate((mXGlobal, mWeightGlobal)):
            if const_expr(self.divisors[i]):
                factors[i] = fp4.divide(factors[i], divisor[0])
        for i in cutlass.range_constexpr(cute.size(rSum)):
            rSum[i] = rSum[i] * factors[0] * factors[1]


def trace(
    arch: str, *, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], config: tuple[Any, ...], even: bool
) -> tuple[Any, list[Any]]:
    """``config``: an ``Fp4Config``."""
    c = Fp4Config(*config)
    width = fake.dtype(out_dtype).width // 8
    out = fake.tensor(out_dtype, (None, None, None), align=width * (2 if even else 1))
    one = fake.tensor("f32", (1,), (1,), align=4)
    mainloop = BlockScaledMainloop(c) if c.block_scaled else DequantMainloop(c)
    made = Fp4Gemm(c, mainloop, swizzled, divisors, even)
    return made, [coded(swizzled), coded(swizzled), one, one, out, fake.stream()]
