"""The warpgroups of the Blackwell decode kernel that have the scores: softmax, and the result. Imports cutlass.

There are two, each with half of the heads. Thread i of one has key i of a tile, which is lane i of tensor memory, so a
head's maximum and sum go across threads, unlike prefill's. Sums are kept apart by thread until a piece is through, and
what is subtracted from a head's scores may lag behind its maximum (``prefill_softmax.LAG``): a tile that exceeds it
nowhere, which nearly all but the first are, costs one vote.

Of E4M3 inputs no maximum lags, P' is rounded to E4M3 as 2^8 P (``prefill_softmax.py`` says why), and what the codes
stand for comes in with the scale of the scores and, when a piece is through, with O.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import warp_ops as op
from ..decode_schedule import Visible, place
from ..decode_types import Scalars, Tensors
from ..warp_ops import exp2, tanh
from . import prefill_softmax as softmax
from . import tmem
from .decode_types import KEYS, ROWS, TallConfig, Work

_INF = float("inf")
_BARRIER = 1  # the named one of the warpgroups
_AT_ONCE = 8  # columns of tensor memory that a thread has beside its scores and sums: more would spill


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """This thread's number, read anew: what follows from it is then not kept in registers all through the kernel."""
    return Int32(
        llvm.inline_asm(
            T.i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def _any(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Whether ``value`` is not 0 in any thread of the warpgroups, which meet for that."""
    text = (
        "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
        f"barrier.cta.red.or.aligned.pred q, {_BARRIER}, {ROWS}, p; selp.s32 $0, 1, 0, q; }}"
    )
    return Int32(
        llvm.inline_asm(
            T.i32(), [value.ir_value(loc=loc, ip=ip)], text, "=r,r,~{memory}", has_side_effects=True,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


def _meet_rows() -> None:
    cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=ROWS)


def across(values: list[Float32], join: Callable[[Float32, Float32], Float32]) -> list[Float32]:
    """Join every value over the lanes of a warp: of n values, lane l then has those from l * n / 32 on, rounded down.

    Lanes exchange halves of what they have, so that 32 values take 31 shuffles.
    """
    lane = thread_index() & 31
    for offset in (16, 8, 4, 2, 1):
        if len(values) > 1:
            half, upper = len(values) // 2, (lane & offset) != 0
            pairs = list(zip(values[:half], values[half:], strict=True))
            sent = [cutlass.select_(upper, low, high) for low, high in pairs]
            values = [cutlass.select_(upper, high, low) for low, high in pairs]
        else:
            sent = values
        values = [join(v, cute.arch.shuffle_sync_bfly(s, offset)) for v, s in zip(values, sent, strict=True)]
    return values


def _four(tensor: cute.Tensor, at: Any) -> cute.Tensor:
    """Four numbers of shared memory, from the ``at``-th on, in registers."""
    got = cute.make_rmem_tensor(4, Float32)
    pointer = cute.make_ptr(Float32, (tensor.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), got)
    return got


def _put_words(address: Int32, words: list[Any]) -> None:
    """Up to 16 bytes to shared memory."""
    count = len(words)
    some = cute.make_rmem_tensor(count, Int32)
    for i, word in enumerate(words):
        some[i] = word
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    cute.autovec_copy(some, cute.make_tensor(pointer, cute.make_layout(count)))


class Rows:
    """The softmax role; ``m`` is what the kernel has in shared memory, ``n`` counts tiles from the kernel's start.

    ``h0`` is the first of a warpgroup's heads, of which it has ``c.own``. Scores and sums take 64 of the 168 registers
    that a thread may have: numbers that are not needed all through are kept in shared memory.
    """

    c: TallConfig

    @property
    def lag(self) -> float:
        return softmax.CODES_LAG if self.c.codes else softmax.LAG

    @cute.jit
    def attend(self, tensors: Tensors, scalars: Scalars, m: Any, n: Int32):
        """All tiles of a piece; leaves O, maxima and sums in shared memory, where the cluster merges them."""
        c = self.c
        thread = thread_index()
        warp = cute.arch.make_warp_uniform(thread // 32)
        h0 = warp // 4 * c.own
        work = self.kept(m.work, Work)
        scalars = scalars._replace(scale=self._scaled(tensors, slice(2), work, scalars.scale))
        if thread < c.heads:
            m.shift[thread] = Float32(0.0)
        if const_expr(c.part < KEYS):
            # A product with 64 rows leaves half of the lanes as they are; loads of tensor memory take all.
            tmem.store(tmem.lanes(c.output + h0, warp), [Float32(0.0)] * c.own)
            tmem.await_stores()
            tmem.before_sync()
        if work.tiles > 0:
            self._load_query(tensors, work, m)
        rSum = cute.make_rmem_tensor(c.own, Float32)
        rSum.fill(0.0)
        for i in cutlass.range(work.tiles, unroll=1):
            low, high = self._bounds(m, i)
            rS = self._scores(scalars, m, n + i, low, high, warp, h0)
            peak = softmax.row_max([rS[h] for h in range(c.own)], -Float32.inf)
            if _any(Int32((i == 0) | (peak > self.lag))) != 0:
                self._raise(m, rS, rSum, n + i, i, warp, h0)
            words = self._weights(rS, rSum)
            if i > 0:
                cute.arch.mbarrier_wait(m.output, (n + i - 1) & 1)
            low, high = self._bounds(m, i)
            if (low > 0) | (high < KEYS):
                self._clear_row(m, n, i, low, high)
            self._leave_weights(m, words, h0)
        self._publish(tensors, m, rSum, n, warp, h0)

    def _scaled(self, tensors: Tensors, which: slice, work: Work, factor: Float32) -> Float32:
        """``factor`` times a sequence's and KV head's entries of those of the scales of q, k and v that there are."""
        for scale in tensors.scales[which] if self.c.scales else ():
            if scale is not None:
                factor = factor * scale[work.b, work.kv_head]
        return factor

    def keep(self, kept: cute.Tensor, values: Any) -> None:
        """Leave numbers that a warp needs later in shared memory, where they cost the softmax no registers."""
        warp = thread_index() >> 5
        with cute.arch.elect_one():
            for i, value in enumerate(values):
                kept[i, warp] = value
        cute.arch.sync_warp()

    def kept(self, kept: cute.Tensor, kind: Any) -> Any:
        """The tuple of such numbers that ``keep`` left."""
        warp = thread_index() >> 5
        got = kind(*(kept[i, warp] for i in range(len(kind._fields))))
        cute.arch.sync_warp()
        return got

    def _bounds(self, m: Any, i: Int32) -> tuple:
        """Of the keys of a piece's tile i those that count, in [0, 128)."""
        work = self.kept(m.work, Work)
        first, low, high = place(self.kept(m.keys, Visible), work.first + i * work.step, KEYS)
        return low - first, high - first

    @cute.jit
    def _load_query(self, tensors: Tensors, work: Work, m: Any):
        """Q to shared memory, as the products want it; heads that pad the CTA's become zeros."""
        size = const_expr(self.c.size)
        by_head = Int64(tensors.q.stride[1]) * size
        start = tensors.q.iterator.toint() + Int64(tensors.q.stride[0]) * work.b * size + by_head * work.head
        if ((start | by_head) & 15) == 0:
            self._copy_query(start, by_head, work, m, 16)
        else:
            self._copy_query(start, by_head, work, m, 4)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        _meet_rows()
        if thread_index() == 0:
            cute.arch.mbarrier_arrive(m.query)

    @cute.jit
    def _copy_query(self, start: Int64, by_head: Int64, work: Work, m: Any, size: cutlass.Constexpr):
        """In copies of ``size`` bytes; the 16-byte chunks of a row lie where a swizzle as wide as the row has them."""
        c = self.c
        copies, width = const_expr(c.dim * c.size // size), const_expr(c.row_bytes)  # copies of a row
        thread = thread_index()
        at = thread % copies * size
        column = m.sQ + at // width * (c.heads * width) + at % 16
        for row in cutlass.range(thread // copies, c.heads, ROWS // copies, unroll=1):
            target = column + row * width + ((at // 16) ^ (row * width // 128)) % (width // 16) * 16
            good = row < work.heads
            if const_expr(size == 16):
                op.copy_16_async(target, start + by_head * row + at, cutlass.select_(good, Int32(16), Int32(0)))
            else:
                op.copy_4_async(target, start + by_head * row + at, cutlass.select_(good, Int32(4), Int32(0)))

    @cute.jit
    def _scores(self, scalars: Scalars, m: Any, n: Int32, low: Int32, high: Int32, warp: Int32, h0: Int32):
        """This thread's key's scores in powers of two, less what is subtracted; -inf where the key does not count."""
        c = self.c
        cute.arch.mbarrier_wait(m.scores + (n & 1), (n >> 1) & 1)
        tmem.after_sync()
        base, scale = tmem.lanes((n & 1) * c.heads + h0, warp), scalars.scale
        if scalars.cap > 0:
            for at in cutlass.range(0, c.own, _AT_ONCE, unroll=1):  # and back to where they were
                some = tmem.load(base + at, _AT_ONCE)
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
            shift = _four(m.shift, h0 + h)
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
    def _raise(self, m: Any, rS: Any, rSum: Any, n: Int32, i: Int32, warp: Int32, h0: Int32):
        """Subtract the maxima of heads that exceed what was subtracted too far; in a piece's first tile, of all."""
        c = self.c
        thread = thread_index()
        self._leave_across(m, [rS[h] for h in range(c.own)], cute.arch.fmax, warp, h0)
        if thread < c.heads:
            four = _four(m.warps, thread * 4)
            top = cute.arch.fmax(cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3]))
            moves = (top > self.lag) | ((i == 0) & (top > -_INF))
            change = cutlass.select_(moves, -top, Float32(0.0))
            m.shift[thread] = m.shift[thread] + change
            m.change[thread] = change
            m.factor[thread] = exp2(change)
        _meet_rows()
        for h in cutlass.range_constexpr(0, c.own, 4):
            change = _four(m.change, h0 + h)
            for x in cutlass.range_constexpr(4):
                rS[h + x] = rS[h + x] + change[x]
        if i > 0:
            cute.arch.mbarrier_wait(m.output, (n - 1) & 1)
            tmem.after_sync()
            for at in cutlass.range(0, c.parts * c.own, _AT_ONCE, unroll=1):
                h = h0 + at % c.own
                address = tmem.lanes(c.output + at // c.own * c.heads + h, warp)
                values = tmem.load(address, _AT_ONCE)
                tmem.await_loads()
                factors = [_four(m.factor, h + x) for x in range(0, _AT_ONCE, 4)]
                tmem.store(address, [v * factors[x // 4][x % 4] for x, v in enumerate(values)])
            tmem.await_stores()
            tmem.before_sync()
            for h in cutlass.range_constexpr(0, c.own, 4):
                factor = _four(m.factor, h0 + h)
                for x in cutlass.range_constexpr(4):
                    rSum[h + x] = rSum[h + x] * factor[x]

    def _leave_across(self, m: Any, values: list[Float32], join: Any, warp: Int32, h0: Int32) -> None:
        """What a warp has of its heads, for the threads that have a head each."""
        lane = thread_index() & 31
        for x, value in enumerate(across(values, join)):
            m.warps[(h0 + lane * self.c.own // 32 + x) * 4 + warp % 4] = value
        _meet_rows()

    @cute.jit
    def _weights(self, rS: Any, rSum: Any):
        """Probabilities, added to the sums; returned as P' has them, as many to a register as fit."""
        c = self.c
        for h in cutlass.range_constexpr(c.own):
            rS[h] = exp2(rS[h])
            rSum[h] = rSum[h] + rS[h]
        words = cute.make_rmem_tensor(c.own * c.size // 4, Int32)
        for w, word in enumerate(softmax.packed([rS[h] for h in range(c.own)], c.dtype)):
            words[w] = word
        return words

    @cute.jit
    def _leave_weights(self, m: Any, words: Any, h0: Int32):
        """This key's row of P', its 16-byte chunks where a swizzle as wide as the row has them."""
        c = self.c
        count = const_expr(c.own * c.size // 4)
        row = thread_index() % KEYS * (c.heads * c.size)
        turn = ((row >> 7) & const_expr(c.heads * c.size // 16 - 1)) * 16
        for w in cutlass.range_constexpr(0, count, 4):
            some = [words[x] for x in range(w, min(w + 4, count))]
            _put_words(m.sP + row + ((h0 * c.size + w * 4) ^ turn), some)
        cute.arch.fence_view_async_shared()
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(m.weights)

    @cute.jit
    def _clear_row(self, m: Any, n: Int32, i: Int32, low: Int32, high: Int32):
        """Zeros over a row of V, a warpgroup half of it, if its key does not count: the cache may hold NaN there."""
        c = self.c
        key, half = thread_index() % KEYS, thread_index() // KEYS
        fill = self.value_fill(n, i, self.kept(m.work, Work).tiles)
        if const_expr(not c.same):
            cute.arch.mbarrier_wait(m.values, (n + i) & 1)
        if (key < low) | (key >= high):
            for p in cutlass.range(c.parts, unroll=1):
                at = m.sKV + m.ring.slot(fill + p) * c.buffer_bytes + key * c.row_bytes
                own = const_expr(c.part * c.size // 2)  # bytes, half of a box or a box
                at += half * const_expr(own if c.part == c.columns else KEYS * c.row_bytes)
                for x in cutlass.range_constexpr(0, own, 16):
                    _put_words(at + x, [Int32(0)] * 4)

    @cute.jit
    def _publish(self, tensors: Tensors, m: Any, rSum: Any, n: Int32, warp: Int32, h0: Int32):
        """O, maxima and sums to shared memory; zeros if the CTA had no tile."""
        c = self.c
        thread = thread_index()
        self._leave_across(m, [rSum[h] for h in range(c.own)], operator.add, warp, h0)
        if thread < c.heads:
            four = _four(m.warps, thread * 4)
            total = (four[0] + four[1]) + (four[2] + four[3])
            m.result[thread * 2] = cutlass.select_(total == 0.0, Float32(-_INF), -m.shift[thread])
            m.result[thread * 2 + 1] = total
        work = self.kept(m.work, Work)
        tiles = work.tiles
        unit = self._scaled(tensors, slice(2, 3), work, Float32(1 / softmax.CODES_UNIT if c.codes else 1))
        lanes = const_expr(c.part // 4)  # of a warp that have a row of O'
        column = warp % 4 * lanes + (thread_index() & 31)
        if tiles > 0:
            cute.arch.mbarrier_wait(m.output, (n + tiles - 1) & 1)
            tmem.after_sync()
        for p in cutlass.range(c.parts, unroll=1):
            rO = cute.make_rmem_tensor(c.own, Float32)
            rO.fill(0.0)
            if tiles > 0:
                values = tmem.load(tmem.lanes(c.output + p * c.heads + h0, warp), c.own)
                tmem.await_loads()
                for h in cutlass.range_constexpr(c.own):
                    rO[h] = values[h] * unit if c.codes else values[h]
            if (thread_index() & 31) < lanes:
                for h in cutlass.range_constexpr(c.own):
                    m.rows[(h0 + h) * c.dim + p * c.part + column] = rO[h]
        tmem.before_sync()
