"""Softmax warpgroups: S' to P', and rescaling of O'.

Each warpgroup has half of the heads. Thread i has row i of a K/V tile, lane i of tensor memory, so maxima and sums of a
head are reduced across threads: sums only at the end. The subtracted maximum follows when it has grown by 2^threshold,
and at a head's first valid key; a tile in which no head needs that costs one vote.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, word_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.reduce import transpose_reduce as across
from torch_attnkit.cuda.sm100 import softmax, tmem
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars, Tensors
from .config import KEYS, LANES, SOFTMAX_THREADS, Config, NamedBarrier
from .cta import CtaCoord, Memory
from .load_tile import mask_of

_INF = float("inf")
_TMEM_COLUMNS = 8  # columns of O' in registers beside S and sums


def sync_softmax() -> None:
    """Named barrier of both softmax warpgroups."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.SOFTMAX), number_of_threads=SOFTMAX_THREADS)


def _thread() -> Int32:
    return cute.arch.thread_idx()[0]


def four(tensor: cute.Tensor, at: Int32) -> cute.Tensor:
    """Load four floats of shared memory from index ``at`` on."""
    got = cute.make_rmem_tensor(4, Float32)
    pointer = cute.make_ptr(Float32, (tensor.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), got)
    return got


class SoftmaxWarps:
    """``h0``: the first of a warpgroup's ``own`` heads."""

    def __init__(self, config: Config):
        self.c, self.own = config, config.mma.own

    def first_head(self) -> Int32:
        return cute.arch.make_warp_uniform(_thread() // KEYS) * self.own

    @cute.jit
    def load_query(self, tensors: Tensors, cta: CtaCoord, m: Memory):
        """Load Q to shared memory in the MMA's layout; padded heads are zero-filled."""
        c = self.c
        chunks, line = const_expr(c.dim * c.itemsize // CHUNK), const_expr(c.mma.row_bytes // CHUNK)  # of a row
        by_head = Int64(tensors.q.stride[1]) * c.itemsize
        start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * cta.token * c.itemsize
        chunk = _thread() % chunks
        source, column = start + by_head * cta.head + chunk * CHUNK, chunk // line * (c.heads * c.mma.row_bytes)
        first, rows_per_copy = _thread() // chunks, const_expr(SOFTMAX_THREADS // chunks)
        source += by_head * first
        # ``at`` is a multiple of ``rows_per_copy``, so that its bits add up to the row's without a carry.
        target, swizzled = m.query_at + column + first * c.mma.row_bytes, (chunk % line) ^ (first & 7)
        for at in cutlass.range_constexpr(0, c.heads, rows_per_copy):
            valid = cutlass.select_(first + at < cta.heads, Int32(CHUNK), Int32(0))
            word_ops.copy_16_async_at(target + (swizzled ^ (at & 7)) * CHUNK, at * c.mma.row_bytes, source, 0, valid)
            source += by_head * rows_per_copy
        cute.arch.cp_async_commit_group()

    @cute.jit
    def release_query(self, m: Memory):
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(m.query)

    @cute.jit
    def run(self, scalars: Scalars, m: Memory, tiles: Int32):
        """All tiles; leaves maxima and sums in shared memory and O' in tensor memory, zeros if there was no tile."""
        c, own = self.c, self.own
        h0 = self.first_head()
        if _thread() < c.heads:
            m.sShift[_thread()] = Float32(0.0)
        sync_softmax()
        rSum = cute.make_rmem_tensor(own, Float32)
        rSum.fill(0.0)
        pending = cutlass.select_(_thread() < c.heads, Int32(1), Int32(0))  # whether this thread's head has no maximum
        word, bit = mask_of(_thread() % KEYS)
        for n in cutlass.range(tiles, unroll=1):
            rS = self._scores(scalars.scale, m, word, bit, n, h0)
            peak = softmax.row_max([rS[h] for h in range(own)], -Float32.inf)
            moves = Int32((peak > scalars.rescale_threshold) | (pending != 0))
            if op.any_of_threads(moves, int(NamedBarrier.SOFTMAX), SOFTMAX_THREADS) != 0:
                pending = self._raise_maxima(scalars.rescale_threshold, m, rS, rSum, pending, n, h0)
            words = self._probabilities(rS, rSum)
            if n > 0:
                cute.arch.mbarrier_wait(m.output, (n - 1) & 1)
            self._leave_probabilities(m, words, h0)
        self._leave_across(m, [rSum[h] for h in range(own)], operator.add, h0)
        if _thread() < c.heads:
            some = four(m.sWarps, _thread() * 4)
            row_sum = (some[0] + some[1]) + (some[2] + some[3])
            m.sStat[_thread() * 2] = cutlass.select_(row_sum == 0.0, Float32(-_INF), -m.sShift[_thread()])
            m.sStat[_thread() * 2 + 1] = row_sum
        if tiles > 0:
            cute.arch.mbarrier_wait(m.output, (tiles - 1) & 1)
            tmem.after_sync()
        else:
            for p in cutlass.range(c.mma.parts, unroll=1):
                at = tmem.lanes(c.mma.tensor_memory.output + p * c.heads + h0, cute.arch.warp_idx())
                tmem.store(at, [Float32(0.0)] * own)
            tmem.await_stores()

    @cute.jit
    def _scores(self, scale: Float32, m: Memory, word: Int32, bit: Int32, n: Int32, h0: Int32):
        """This thread's key's scores in powers of two, less the subtracted maxima; -inf if ``bit`` of ``word`` is not
        set."""
        c, own = self.c, self.own
        m.ring.wait(n * c.mma.parts)  # the first part publishes the mask
        mask = m.sMask[word, n % c.masks if const_expr(c.masks > 1) else 0]
        cute.arch.mbarrier_wait(m.scores + (n & 1), (n >> 1) & 1)
        tmem.after_sync()
        got = tmem.load(tmem.lanes(c.mma.tensor_memory.scores(n & 1) + h0, cute.arch.warp_idx()), own)
        tmem.await_loads()
        tmem.before_sync()
        rS = cute.make_rmem_tensor(own, Float32)
        for h in cutlass.range_constexpr(0, own, 4):
            shift = four(m.sShift, h0 + h)
            for x in cutlass.range_constexpr(0, 4, 2):
                rS[h + x], rS[h + x + 1] = cute.arch.fma_packed_f32x2(
                    (got[h + x], got[h + x + 1]), (scale, scale), (shift[x], shift[x + 1])
                )
        counts = (mask >> bit) & 1 != 0
        if not cute.arch.vote_all_sync(counts):
            for h in cutlass.range_constexpr(own):
                rS[h] = cutlass.select_(counts, rS[h], Float32(-_INF))
        return rS

    @cute.jit
    def _raise_maxima(
        self,
        threshold: Float32,
        m: Memory,
        rS: cute.Tensor,
        rSum: cute.Tensor,
        pending: Int32,
        n: Int32,
        h0: Int32,
    ):
        """Raise the subtracted maxima of heads that exceed the threshold or had none, rescaling O' and sums; returns
        whether this thread's head still has none."""
        c, own = self.c, self.own
        self._leave_across(m, [rS[h] for h in range(own)], cute.arch.fmax, h0)
        if _thread() < c.heads:
            some = four(m.sWarps, _thread() * 4)
            row_max = cute.arch.fmax(cute.arch.fmax(some[0], some[1]), cute.arch.fmax(some[2], some[3]))
            first = (pending != 0) & (row_max > -_INF)
            change = cutlass.select_((row_max > threshold) | first, -row_max, Float32(0.0))
            m.sShift[_thread()] = m.sShift[_thread()] + change
            m.sChange[_thread()] = change
            # Before a head's first valid key O' is 0, and exp2(change) may overflow.
            m.sFactor[_thread()] = cutlass.select_(pending != 0, Float32(0.0), exp2(change))
            pending = cutlass.select_(first, Int32(0), pending)
        sync_softmax()
        for h in cutlass.range_constexpr(0, own, 4):
            change = four(m.sChange, h0 + h)
            for x in cutlass.range_constexpr(4):
                rS[h + x] = rS[h + x] + change[x]
        if n > 0:
            cute.arch.mbarrier_wait(m.output, (n - 1) & 1)
            tmem.after_sync()
            for at in cutlass.range(0, c.mma.parts * own, _TMEM_COLUMNS, unroll=1):
                h = h0 + at % own
                address = tmem.lanes(c.mma.tensor_memory.output + at // own * c.heads + h, cute.arch.warp_idx())
                values = tmem.load(address, _TMEM_COLUMNS)
                tmem.await_loads()
                factors = [four(m.sFactor, h + x) for x in range(0, _TMEM_COLUMNS, 4)]
                tmem.store(address, [v * factors[x // 4][x % 4] for x, v in enumerate(values)])
            tmem.await_stores()
            tmem.before_sync()
            for h in cutlass.range_constexpr(0, own, 4):
                factor = four(m.sFactor, h0 + h)
                for x in cutlass.range_constexpr(4):
                    rSum[h + x] = rSum[h + x] * factor[x]
        return pending

    def _leave_across(
        self, m: Memory, values: list[Float32], join: Callable[[Float32, Float32], Float32], h0: Int32
    ) -> None:
        """Reduce values over a warp, and leave them for the threads that have a head each."""
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        for x, value in enumerate(across(values, join)):
            m.sWarps[(h0 + lane * self.own // LANES + x) * 4 + warp] = value
        sync_softmax()

    @cute.jit
    def _probabilities(self, rS: cute.Tensor, rSum: cute.Tensor):
        """P', added to the sums; two values to a register."""
        own = self.own
        for h in cutlass.range_constexpr(own):
            rS[h] = exp2(rS[h])
        for h in cutlass.range_constexpr(0, own, 2):
            rSum[h], rSum[h + 1] = cute.arch.add_packed_f32x2((rSum[h], rSum[h + 1]), (rS[h], rS[h + 1]))
        words = cute.make_rmem_tensor(own // 2, Int32)
        for w, word in enumerate(softmax.packed([rS[h] for h in range(own)], self.c.dtype)):
            words[w] = word
        return words

    @cute.jit
    def _leave_probabilities(self, m: Memory, words: cute.Tensor, h0: Int32):
        """Store this key's row of P' with a swizzle as wide as the row."""
        c = self.c
        width = const_expr(c.heads * c.itemsize)
        row = _thread() % KEYS * width
        swizzle = ((row >> 7) & const_expr(width // CHUNK - 1)) * CHUNK
        for w in cutlass.range_constexpr(0, self.own // 2, 4):
            at = m.p_at + row + ((h0 * c.itemsize + w * 4) ^ swizzle)
            copies.store_words(at, [words[w + x] for x in range(4)], cute.AddressSpace.smem)
        cute.arch.fence_view_async_shared()
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(m.probabilities)
