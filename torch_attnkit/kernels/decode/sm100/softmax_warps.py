"""The softmax role of the Blackwell decode kernel: two warpgroups, each with half of the heads.

    S' (tensor memory) -> scale, cap, mask -> P' (shared memory); O' *= factor where a maximum moved

Thread i of a warpgroup has key i of a tile, which is lane i of tensor memory, so a head's maximum and sum go across
threads, unlike prefill's. Sums stay apart by thread until the work tile ends, and what is subtracted from a head's
scores may lag behind its maximum by ``softmax.LAG``: a tile that exceeds it nowhere, as nearly all but the first,
costs one vote.

Of E4M3 inputs no maximum lags, P' is rounded to E4M3 as 2^8 P (``cuda/sm100/softmax.py`` says why), and the scales of
q, k and v go into the scale of the scores and, at the work tile's end, into O.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.reduce import transpose_reduce
from torch_attnkit.cuda.sm100 import softmax, tmem
from torch_attnkit.cuda.warp_ops import exp2, tanh, thread_index

from ..arguments import Scalars, Tensors, descaled
from ..schedule import tile_bounds
from .config import KEYS, SOFTMAX_THREADS, NamedBarrier, Tcgen05Config
from .memory import CtaTile, Memory, value_fill

_INF = float("inf")
_TMEM_COLUMNS = 8  # columns of tensor memory that a thread has beside its scores and sums: more would spill


def _barrier() -> None:
    """Of the softmax warpgroups."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.SOFTMAX), number_of_threads=SOFTMAX_THREADS)


def _load_4(tensor: cute.Tensor, at: Int32) -> cute.Tensor:
    """Four floats of shared memory, from the ``at``-th on."""
    got = cute.make_rmem_tensor(4, Float32)
    pointer = cute.make_ptr(Float32, (tensor.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), got)
    return got


def _store_words(address: Int32, words: list[Int32]) -> None:
    """Up to 16 bytes to shared memory."""
    count = len(words)
    some = cute.make_rmem_tensor(count, Int32)
    for i, word in enumerate(words):
        some[i] = word
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    cute.autovec_copy(some, cute.make_tensor(pointer, cute.make_layout(count)))


class SoftmaxWarps:
    """The softmax role; ``m`` is what the kernel has in shared memory, ``n`` counts tiles from the kernel's start.

    ``h0`` is the first of a warpgroup's heads, of which it has ``c.own``. Scores and sums take 64 of the 168 registers
    that a thread may have: what is not needed throughout stays in shared memory.
    """

    def __init__(self, config: Tcgen05Config):
        self.c = config

    @property
    def _lag(self) -> float:
        return softmax.CODES_LAG if self.c.fp8 else softmax.LAG

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, m: Memory, n: Int32):
        """All tiles of a work tile; leaves O, maxima and sums in shared memory, where the cluster combines them."""
        c = self.c
        thread = thread_index()
        warp = cute.arch.make_warp_uniform(thread // 32)
        h0 = warp // 4 * c.own
        tile = m.tile.get()
        scalars = scalars._replace(scale=descaled(tensors, slice(2), tile, scalars.scale))
        if thread < c.heads:
            m.sShift[thread] = Float32(0.0)
        if const_expr(c.part < KEYS):
            # A product with 64 rows leaves half of the lanes as they are; loads of tensor memory take all.
            tmem.store(tmem.lanes(c.tensor_memory.output + h0, warp), [Float32(0.0)] * c.own)
            tmem.await_stores()
            tmem.before_sync()
        if tile.tiles > 0:
            self._load_query(tensors, tile, m)
        rSum = cute.make_rmem_tensor(c.own, Float32)
        rSum.fill(0.0)
        for i in cutlass.range(tile.tiles, unroll=1):
            low, high = self._bounds(m, i)
            rS = self._scores(scalars, m, n + i, low, high, warp, h0)
            peak = softmax.row_max([rS[h] for h in range(c.own)], -Float32.inf)
            if op.any_of_threads(Int32((i == 0) | (peak > self._lag)), int(NamedBarrier.SOFTMAX), SOFTMAX_THREADS) != 0:
                self._raise_maxima(m, rS, rSum, n + i, i, warp, h0)
            words = self._probabilities(rS, rSum)
            if i > 0:
                cute.arch.mbarrier_wait(m.output, (n + i - 1) & 1)
            low, high = self._bounds(m, i)
            if (low > 0) | (high < KEYS):
                self._zero_row(m, n, i, low, high)
            self._store_p(m, words, h0)
        self._publish(tensors, m, rSum, n, warp, h0)

    def _bounds(self, m: Memory, i: Int32) -> tuple[Int32, Int32]:
        """Of the keys of a work tile's tile i those that count, in [0, 128)."""
        tile = m.tile.get()
        first, low, high = tile_bounds(m.keys.get(), tile.first + i * tile.step, KEYS)
        return low - first, high - first

    @cute.jit
    def _load_query(self, tensors: Tensors, tile: CtaTile, m: Memory):
        """Q to shared memory, as the products want it; heads that pad the CTA's become zeros."""
        size = const_expr(self.c.itemsize)
        by_head = Int64(tensors.q.stride[1]) * size
        start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * tile.b * size + by_head * tile.head
        if ((start | by_head) & 15) == 0:
            self._copy_query(start, by_head, tile, m, 16)
        else:
            self._copy_query(start, by_head, tile, m, 4)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        _barrier()
        if thread_index() == 0:
            cute.arch.mbarrier_arrive(m.query)

    @cute.jit
    def _copy_query(self, start: Int64, by_head: Int64, tile: CtaTile, m: Memory, size: cutlass.Constexpr):
        """In copies of ``size`` bytes; the 16-byte chunks of a row lie where a swizzle as wide as the row has them."""
        c = self.c
        copies, width = const_expr(c.width * c.itemsize // size), const_expr(c.row_bytes)  # copies of a row
        for index in cutlass.range(thread_index(), c.heads * copies, SOFTMAX_THREADS, unroll=1):
            row, at = index // copies, index % copies * size
            target = m.query_at + at // width * (c.heads * width) + at % 16
            target += row * width + ((at // 16) ^ (row * width // 128)) % (width // 16) * 16
            inside = row < tile.heads
            if const_expr(c.width > c.dim):
                inside = inside & (at < c.dim * c.itemsize)
            if const_expr(size == 16):
                op.copy_16_async(target, start + by_head * row + at, cutlass.select_(inside, Int32(16), Int32(0)))
            else:
                op.copy_4_async(target, start + by_head * row + at, cutlass.select_(inside, Int32(4), Int32(0)))

    @cute.jit
    def _scores(self, scalars: Scalars, m: Memory, n: Int32, low: Int32, high: Int32, warp: Int32, h0: Int32):
        """This thread's key's scores in powers of two, less what is subtracted; -inf where the key does not count."""
        c = self.c
        cute.arch.mbarrier_wait(m.scores + (n & 1), (n >> 1) & 1)
        tmem.after_sync()
        base, scale = tmem.lanes(c.tensor_memory.scores(n & 1) + h0, warp), scalars.scale
        if scalars.cap > 0:
            for at in cutlass.range(0, c.own, _TMEM_COLUMNS, unroll=1):  # and back to where they were
                some = tmem.load(base + at, _TMEM_COLUMNS)
                tmem.await_loads()
                tmem.store(base + at, [scalars.cap * tanh(x * scale) for x in some])
            tmem.await_stores()
            scale = Float32(1.0)
        got = tmem.load(base, c.own)
        tmem.await_loads()
        tmem.before_sync()
        rS = cute.make_rmem_tensor(c.own, Float32)
        for h, value in enumerate(softmax.rescaled(got, scale)):
            rS[h] = value
        for h in cutlass.range_constexpr(0, c.own, 4):
            shift = _load_4(m.sShift, h0 + h)
            for x in cutlass.range_constexpr(0, 4, 2):
                pair = cute.arch.add_packed_f32x2((rS[h + x], rS[h + x + 1]), (shift[x], shift[x + 1]))
                rS[h + x], rS[h + x + 1] = pair
        if (low > 0) | (high < KEYS):
            key = thread_index() % KEYS
            counts = (key >= low) & (key < high)
            for h in cutlass.range_constexpr(c.own):
                rS[h] = cutlass.select_(counts, rS[h], Float32(-_INF))
        return rS

    @cute.jit
    def _raise_maxima(self, m: Memory, rS: cute.Tensor, rSum: cute.Tensor, n: Int32, i: Int32, warp: Int32, h0: Int32):
        """Subtract the maxima of heads that exceed what was subtracted too far; in a work tile's first tile, of all."""
        c = self.c
        thread = thread_index()
        self._reduce_heads(m, [rS[h] for h in range(c.own)], cute.arch.fmax, warp, h0)
        if thread < c.heads:
            warps = _load_4(m.sWarps, thread * 4)
            row_max = cute.arch.fmax(cute.arch.fmax(warps[0], warps[1]), cute.arch.fmax(warps[2], warps[3]))
            moves = (row_max > self._lag) | ((i == 0) & (row_max > -_INF))
            change = cutlass.select_(moves, -row_max, Float32(0.0))
            m.sShift[thread] = m.sShift[thread] + change
            m.sChange[thread] = change
            m.sFactor[thread] = exp2(change)
        _barrier()
        for h in cutlass.range_constexpr(0, c.own, 4):
            change = _load_4(m.sChange, h0 + h)
            for x in cutlass.range_constexpr(4):
                rS[h + x] = rS[h + x] + change[x]
        if i > 0:
            cute.arch.mbarrier_wait(m.output, (n - 1) & 1)
            tmem.after_sync()
            for at in cutlass.range(0, c.value_parts * c.own, _TMEM_COLUMNS, unroll=1):
                h = h0 + at % c.own
                address = tmem.lanes(c.tensor_memory.output + at // c.own * c.heads + h, warp)
                values = tmem.load(address, _TMEM_COLUMNS)
                tmem.await_loads()
                factors = [_load_4(m.sFactor, h + x) for x in range(0, _TMEM_COLUMNS, 4)]
                tmem.store(address, [v * factors[x // 4][x % 4] for x, v in enumerate(values)])
            tmem.await_stores()
            tmem.before_sync()
            for h in cutlass.range_constexpr(0, c.own, 4):
                factor = _load_4(m.sFactor, h0 + h)
                for x in cutlass.range_constexpr(4):
                    rSum[h + x] = rSum[h + x] * factor[x]

    def _reduce_heads(
        self, m: Memory, values: list[Float32], join: Callable[[Float32, Float32], Float32], warp: Int32, h0: Int32
    ) -> None:
        """A warp's share of its heads' maxima or sums to shared memory, for the threads that have a head each."""
        lane = thread_index() & 31
        for x, value in enumerate(transpose_reduce(values, join)):
            m.sWarps[(h0 + lane * self.c.own // 32 + x) * 4 + warp % 4] = value
        _barrier()

    @cute.jit
    def _probabilities(self, rS: cute.Tensor, rSum: cute.Tensor):
        """Probabilities, added to the sums; returned as P' has them, as many to a register as fit."""
        c = self.c
        for h in cutlass.range_constexpr(c.own):
            rS[h] = exp2(rS[h])
            rSum[h] = rSum[h] + rS[h]
        words = cute.make_rmem_tensor(c.own * c.itemsize // 4, Int32)
        for w, word in enumerate(softmax.packed([rS[h] for h in range(c.own)], c.dtype)):
            words[w] = word
        return words

    @cute.jit
    def _store_p(self, m: Memory, words: cute.Tensor, h0: Int32):
        """This key's row of P', its 16-byte chunks where a swizzle as wide as the row has them."""
        c = self.c
        count = const_expr(c.own * c.itemsize // 4)
        row = thread_index() % KEYS * (c.heads * c.itemsize)
        swizzle = ((row >> 7) & const_expr(c.heads * c.itemsize // 16 - 1)) * 16
        for w in cutlass.range_constexpr(0, count, 4):
            some = [words[x] for x in range(w, min(w + 4, count))]
            _store_words(m.p_at + row + ((h0 * c.itemsize + w * 4) ^ swizzle), some)
        cute.arch.fence_view_async_shared()
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(m.probabilities)

    @cute.jit
    def _zero_row(self, m: Memory, n: Int32, i: Int32, low: Int32, high: Int32):
        """Zeros over a row of V, a warpgroup half of it, if its key does not count: the cache may hold NaN there."""
        c = self.c
        key, half = thread_index() % KEYS, thread_index() // KEYS
        fill = value_fill(c, n, i, m.tile.get().tiles)
        if const_expr(not c.same):
            cute.arch.mbarrier_wait(m.values, (n + i) & 1)
        if (key < low) | (key >= high):
            for p in cutlass.range(c.value_parts, unroll=1):
                at = m.ring_at + m.ring.slot(fill + p) * c.stage_bytes + key * c.row_bytes
                own = const_expr(c.part * c.itemsize // 2)  # bytes, half of a box or a box
                at += half * const_expr(own if c.part == c.columns else KEYS * c.row_bytes)
                for x in cutlass.range_constexpr(0, own, 16):
                    _store_words(at + x, [Int32(0)] * 4)

    @cute.jit
    def _publish(self, tensors: Tensors, m: Memory, rSum: cute.Tensor, n: Int32, warp: Int32, h0: Int32):
        """O, maxima and sums to shared memory; zeros if the CTA had no tile."""
        c = self.c
        thread = thread_index()
        self._reduce_heads(m, [rSum[h] for h in range(c.own)], operator.add, warp, h0)
        if thread < c.heads:
            warps = _load_4(m.sWarps, thread * 4)
            row_sum = (warps[0] + warps[1]) + (warps[2] + warps[3])
            m.sStat[thread * 2] = cutlass.select_(row_sum == 0.0, Float32(-_INF), -m.sShift[thread])
            m.sStat[thread * 2 + 1] = row_sum
        tile = m.tile.get()
        tiles = tile.tiles
        unit = descaled(tensors, slice(2, 3), tile, Float32(1 / softmax.CODES_UNIT if c.fp8 else 1))
        lanes = const_expr(c.part // 4)  # of a warp that have a row of O'
        column = warp % 4 * lanes + (thread_index() & 31)
        if tiles > 0:
            cute.arch.mbarrier_wait(m.output, (n + tiles - 1) & 1)
            tmem.after_sync()
        for p in cutlass.range(c.value_parts, unroll=1):
            rO = cute.make_rmem_tensor(c.own, Float32)
            rO.fill(0.0)
            if tiles > 0:
                values = tmem.load(tmem.lanes(c.tensor_memory.output + p * c.heads + h0, warp), c.own)
                tmem.await_loads()
                for h in cutlass.range_constexpr(c.own):
                    rO[h] = values[h] * unit if c.fp8 else values[h]
            if (thread_index() & 31) < lanes:
                for h in cutlass.range_constexpr(c.own):
                    m.sO[(h0 + h) * c.dim_v + p * c.part + column] = rO[h]
        tmem.before_sync()
