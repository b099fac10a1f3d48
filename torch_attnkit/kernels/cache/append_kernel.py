"""Device side of rope_kv_cache_append: a token of each sequence, RoPE of its heads and its rows in caches, one launch.

    CTA (2 h, b)       keys of KV head h of sequence b: rows of a full cache up by one -> RoPE of the new key -> its row
    CTA (2 h + 1, b)   values, likewise
    CTAs behind them   heads of q of sequence b: RoPE -> q_out; of the first one sinks to float32

Rows move in place: all threads load some vectors, meet, and store them a row lower, where nobody reads any more. A
thread has a vector of both halves of a head's rotated channels, so that a pair lies in one thread.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, pdl
from torch_attnkit.cuda.rope import rotated_back

_IN_FLIGHT = 4  # vectors of a thread that move at once


class _Appender:
    """``width``: elements of a vector; ``moves``: caches are full."""

    def __init__(self, dims: tuple[int, int], pairs: int, width: int, threads: int, moves: bool):
        self.dims, self.pairs, self.width, self.threads, self.moves = dims, pairs, width, threads, moves
        self.tasks = (dims[0] - pairs) // width  # of a head: two vectors of pairs, or one of other channels

    @cute.jit
    def __call__(
        self,
        heads: tuple,  # of q (B, Hq, D), keys (B, Hkv, D) and values (B, Hkv, Dv)
        caches: tuple,  # (B, Hkv, S, D) and (B, Hkv, S, Dv)
        angles: tuple,  # cos and sin, (B, 1, R2) or (1, 1, R2)
        mSlot: cute.Tensor | None,  # (B,) or (1,)
        sinks: tuple | None,  # (Hq,), and the same in float32
        mOut: cute.Tensor,  # (B, Hq, D), contiguous
        steps: tuple,  # 1 or 0, from one sequence to the next: of rows of the angles, of slots
        stream: cuda.CUstream,
    ):
        blocks = (Int32(mOut.shape[1]) * self.tasks + (self.threads - 1)) // self.threads
        self.kernel(heads, caches, angles, mSlot, sinks, mOut, steps).launch(
            grid=(2 * Int32(caches[0].shape[1]) + blocks, mOut.shape[0], 1), block=(self.threads, 1, 1), stream=stream,
            use_pdl=pdl.use(),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        heads: tuple,
        caches: tuple,
        angles: tuple,
        mSlot: cute.Tensor | None,
        sinks: tuple | None,
        mOut: cute.Tensor,
        steps: tuple,
    ):
        (mQ, mK, mV), (mKcache, mVcache) = heads, caches
        pdl.launch_dependents()
        pdl.wait()
        block, sequence, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        sides = 2 * Int32(mK.shape[1])
        cos_sin = [m.iterator + Int64(sequence * steps[0]) * m.stride[0] for m in angles]
        if block < sides:
            head, rows = block // 2, Int32(mKcache.shape[2])
            row = rows - 1
            if const_expr(mSlot is not None):
                slot = Int64(copies.scalar(mSlot.iterator + sequence * steps[1]))
                row = Int32(cutlass.select_((slot >= 0) & (slot < Int64(rows)), slot, Int64(-1)))
            if block % 2 == 0:
                cache = _at(mKcache, sequence, head)
                if const_expr(self.moves):
                    self.move(cache, mKcache.stride[2], rows, self.dims[0])
                if (row >= 0) & (thread < self.tasks):
                    self.rotate(_at(mK, sequence, head), cos_sin, cache + Int64(row) * mKcache.stride[2], thread)
            else:
                cache = _at(mVcache, sequence, head)
                if const_expr(self.moves):
                    self.move(cache, mVcache.stride[2], rows, self.dims[1])
                if (row >= 0) & (thread < self.dims[1] // self.width):
                    self.copy(_at(mV, sequence, head), cache + Int64(row) * mVcache.stride[2], thread * self.width)
        else:
            item = (block - sides) * self.threads + thread
            head = item // self.tasks
            if head < Int32(mQ.shape[1]):
                target = mOut.iterator + (Int64(sequence) * mOut.shape[1] + head) * self.dims[0]
                self.rotate(_at(mQ, sequence, head), cos_sin, target, item - head * self.tasks)
            if const_expr(sinks is not None):
                mSink, mFloats = sinks
                if (block == sides) & (sequence == 0):
                    for h in cutlass.range(thread, Int32(mSink.shape[0]), self.threads, unroll=1):
                        mFloats[h] = Float32(mSink[h])

    @cute.jit
    def move(self, cache: Any, step: Any, rows: Int32, dim: cutlass.Constexpr):
        """Rows of a head, ``step`` elements apart, one row up, by all threads."""
        each, thread = const_expr(dim // self.width), cute.arch.thread_idx()[0]
        count = (rows - 1) * each
        for first in cutlass.range(0, count, self.threads * _IN_FLIGHT, unroll=1):
            rX = copies.fragments(_IN_FLIGHT, self.width, cache.value_type)
            at = [first + i * self.threads + thread for i in range(_IN_FLIGHT)]
            to = [cache + (Int64(n // each) * step + (n % each) * self.width) for n in at]
            for i in cutlass.range_constexpr(_IN_FLIGHT):
                if at[i] < count:
                    copies.load(to[i] + step, rX[i])
            cute.arch.barrier()
            for i in cutlass.range_constexpr(_IN_FLIGHT):
                if at[i] < count:
                    copies.store(rX[i], to[i])

    @cute.jit
    def rotate(self, source: Any, cos_sin: list, target: Any, task: Int32):
        """A head's two vectors of pairs, or a vector of its channels that stay."""
        width, pairs = const_expr(self.width), const_expr(self.pairs)
        col = task * width
        if col < pairs:
            rA, rB = copies.fragments(2, width, source.value_type)
            copies.load(source + col, rA)
            copies.load(source + (col + pairs), rB)
            rCos, rSin = copies.fragments(2, width, cos_sin[0].value_type)
            copies.load(cos_sin[0] + col, rCos)
            copies.load(cos_sin[1] + col, rSin)
            rY = copies.fragments(2, width, Float32)
            for i in cutlass.range_constexpr(width):
                a, b, cos, sin = (r[i].to(Float32) for r in (rA, rB, rCos, rSin))
                rY[0][i], rY[1][i] = rotated_back(a, b, cos, -sin)
            rA.store(rY[0].load().to(source.value_type))
            rB.store(rY[1].load().to(source.value_type))
            copies.store(rA, target + col)
            copies.store(rB, target + (col + pairs))
        else:
            self.copy(source, target, col + pairs)

    @cute.jit
    def copy(self, source: Any, target: Any, col: Int32):
        rX = cute.make_rmem_tensor(self.width, source.value_type)
        copies.load(source + col, rX)
        copies.store(rX, target + col)


def _at(tensor: cute.Tensor, sequence: Int32, head: Int32) -> Any:
    """Where a head of a sequence begins."""
    return tensor.iterator + (Int64(sequence) * tensor.stride[0] + Int64(head) * tensor.stride[1])


def trace(
    arch: str,
    dims: tuple[int, int],
    pairs: int,
    dtypes: tuple[str, str, str | None, str | None],
    width: int,
    threads: int,
) -> tuple[Any, list[Any]]:
    """``dims`` of a head of q and keys, and of values; ``dtypes`` of them, angles, slots (None: caches are full) and
    sinks; a vector has ``width`` elements."""
    new, angle, slot, sink = dtypes
    align, angle_align = (min(16, width * fake.dtype(name).width // 8) for name in (new, angle))
    sinks = None if sink is None else tuple(
        fake.tensor(name, (None,), align=fake.dtype(name).width // 8) for name in (sink, "f32")
    )  # fmt: skip
    arguments = [
        tuple(fake.tensor(new, (None, None, d), align=align) for d in (dims[0], *dims)),
        tuple(fake.tensor(new, (None, None, None, d), align=align) for d in dims),
        tuple(fake.tensor(angle, (None, None, None), align=angle_align) for _ in range(2)),
        None if slot is None else fake.tensor(slot, (None,), align=4),
        sinks,
        fake.tensor(new, (None, None, dims[0]), align=align),
        (Int32(0), Int32(0)),
        fake.stream(),
    ]
    return _Appender(dims, pairs, width, threads, slot is None), arguments
