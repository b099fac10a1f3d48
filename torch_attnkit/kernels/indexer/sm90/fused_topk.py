"""Scores and top-k in one cooperative kernel, for few tokens of one request on Hopper: scores never leave shared
memory.

    kernel_few_tokens.py   each CTA's share of the keys -> scores in its shared memory
    up to 3 passes         histogram of the next 11 bits -> global atomics; a warp per token scans the sums for the bin
                           of the K-th largest score
    once                   number of selected entries of each CTA -> all CTAs -> indices, in ascending order

The radix select of ``kernels/topk`` over a row that is distributed over all CTAs, which are co-resident. Results do not
depend on their order. There are no grid barriers: how many keys a pass counts is known, so a reader spins until the
sums are complete. Sums are zeroed while keys load; arrival counters are zero before and after the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies, counters, fake, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.warp_scan import up_to_lane

from ...topk.kernel import canonical, ones, score_of
from ...topk.radix_histogram import lanes_below
from ..arguments import Tensors
from .kernel_few_tokens import FewTokens, stream_arguments
from .plan import BINS, BITS, CONSUMERS, GROUP, GROUPS, LINE, PASSES, SUMS, TILE, SelectConfig, StreamConfig

_LANES = 32
_THREADS = CONSUMERS * 128  # that select
_WARPS = _THREADS // _LANES
_BARRIER, _START = 1, 2  # of those threads; of them and the warp that waits for zeros
_ZEROS, _LEFT = 0, LINE  # counters of arrivals: whose share of the sums is zero, and who needs no arrivals any more
_NONE = 0xFF800000  # the key of -inf and NaN: above all others


@cute.jit
def load_relaxed(at: cute.Pointer):
    """Relaxed load of what other CTAs write."""
    return cute.arch.load(at, Int32, sem="relaxed", scope="gpu")


@cute.jit
def add(to: cute.Pointer, number: Int32):
    """Relaxed reduction to global memory."""
    cute.arch.red(to, number, op="add", dtype=Int32, sem="relaxed", scope="gpu")


def shift_of(p: int) -> int:
    """Key bits below those of pass ``p``."""
    return max(0, 32 - BITS * (p + 1))


def bins_of(p: int) -> int:
    """Bins of pass ``p``: the last one has the remaining bits."""
    return 1 << min(BITS, 32 - BITS * p)


@dataclass
class Choice(Fixed):
    """Of each token: scores and histogram in shared memory, and the state of the selection.

    Keys below ``sLimit`` are selected, and the first ``sQuota`` of those equal to it. While ``sOpen`` is not 0, it is
    the number of keys in the interval of the K-th, which begins at the limit, and the quota is the rank of the K-th in
    it."""

    sScores: cute.Tensor  # (capacity, tokens): of this block's keys
    sCounts: cute.Tensor  # (BINS, tokens)
    sLimit: cute.Tensor  # (tokens)
    sQuota: cute.Tensor  # (tokens)
    sOpen: cute.Tensor  # (tokens)
    sChosen: cute.Tensor  # (2, warps, tokens): keys below the limit, and those that equal it
    sBefore: cute.Tensor  # (2, tokens): the same in all blocks before this one
    sAll: cute.Tensor  # (2, tokens)


class FusedTopk(Fixed):
    """``stream`` loads and scores keys; this selects."""

    def __init__(self, config: SelectConfig):
        self.c, self.stream = config, FewTokens(config.stream)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, D)
        mK: cute.Tensor,  # (1, S, D), or in pages
        mWeight: cute.Tensor,  # (T, H)
        mLength: cute.Tensor,  # (T,)
        mTable: cute.Tensor | None,  # (1, M)
        mQScale: cute.Tensor | None,  # (T, H, 1)
        mKScale: cute.Tensor | None,  # (1, S, 1)
        mIndices: cute.Tensor,  # (T, K), contiguous
        workspace: tuple,  # (SUMS * PASSES * T + 2 * blocks * T) sums of passes, and what each block has chosen;
        # (2 * LINE) counters of arrivals, zero
        cut: tuple,  # entries, blocks
        stream: cuda.CUstream,
    ):
        c, part = self.c.stream, self.stream
        queries, keys, atoms = part.by_tma(mQ, mK)
        tensors = (mK, mWeight, mLength, None, mTable, mQScale, mKScale)
        exchange, (entries, blocks) = (mIndices, *workspace), cut
        self.kernel(*atoms[0], *atoms[1], queries, keys, tensors, exchange, entries).launch(
            grid=(blocks, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
            cooperative=True,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_rows: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_rows: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        tensors: tuple,
        exchange: tuple,
        entries: Int32,
    ):
        c, part = self.c.stream, self.stream
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = part.shared(q_layout, k_layout, warp)
        choice = self.choice()
        row = cute.make_layout((c.tokens, entries), stride=(self.c.capacity, 1))
        t = Tensors(*tensors, cute.make_tensor(choice.sScores.iterator, row))
        cute.arch.mbarrier_init_fence()
        guess = part.begin(t, shared, k_atom, q_atom, warp, Int32(1))
        seen = part.share(shared, 0)
        first = seen.begin * TILE
        # Row ``first`` of a token's scores is the first that this block has.
        t = Tensors(*tensors, cute.make_tensor(choice.sScores.iterator - first, row))
        if warp == c.loader:
            part.load_keys(t, shared, k_atom, k_rows, seen, guess)
        elif warp == c.loader + 1:
            part.load_queries(t, shared, q_atom, q_rows, seen)
            self.make_zeros(exchange)
        elif warp == c.loader + 2:
            if const_expr(c.scales):  # else there is no such warp
                part.load_tiles(t, shared, seen, guess, None)
        else:
            self.clear_counts(choice)
            part.consume(t, shared, seen)
            rows = cutlass.min(shared.sStart[1] * TILE, entries)  # of all blocks
            self.choose(choice, exchange, rows, first, cutlass.min(seen.end * TILE, entries) - first)

    def choice(self) -> Choice:
        """Shared memory of the selection."""
        memory, n = cutlass.memory.SmemAllocator(), self.c.tokens
        ints = lambda *shape: memory.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)
        scores = memory.allocate_tensor(Float32, cute.make_layout((self.c.capacity, n)), byte_alignment=16)
        return Choice(
            scores, ints(BINS, n), ints(n), ints(n), ints(n), ints(2, _WARPS, n), ints(2, n), ints(2, n)
        )  # fmt: skip

    @cute.jit
    def clear_counts(self, choice: Choice):
        """Zero the histograms; a barrier must follow."""
        thread, _, _ = cute.arch.thread_idx()
        first = choice.sCounts.iterator.toint()
        for i in cutlass.range(thread, BINS * self.c.tokens // 4, _THREADS, unroll=1):
            copies.store_words(first + 16 * i, [Int32(0)] * 4, cute.AddressSpace.smem)

    def barrier(self) -> None:
        """Named barrier of the selecting threads."""
        cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=_THREADS)

    @cute.jit
    def make_zeros(self, exchange: tuple):
        """One warp: zero this CTA's share of the sums, and wait for all CTAs."""
        lane, block, blocks = cute.arch.lane_idx(), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        _, mSums, mArrivals = exchange
        for i in cutlass.range(block * _LANES + lane, self.slot(self.c.tokens, 0), blocks * _LANES, unroll=1):
            mSums[i] = Int32(0)
        cute.arch.sync_warp()
        if lane == 0:
            here = (mArrivals.iterator + _ZEROS).toint()
            op.add_acq_rel(here, Int32(1))
            while memory_ops.load_acquire(here) < blocks:
                pass
        cute.arch.sync_warp()
        self.start()

    def start(self) -> None:
        """Scores and zeroed sums are ready."""
        cute.arch.barrier(barrier_id=_START, number_of_threads=_THREADS + _LANES)

    @cute.jit
    def choose(self, choice: Choice, exchange: tuple, rows: Int32, first: Int32, count: Int32):
        """Consumers: select among this CTA's ``count`` scores of each token, from ``first`` on, and all others,
        ``rows`` in all."""
        mIndices, mSums, mArrivals = exchange
        thread, topk = cute.arch.thread_idx()[0], Int32(mIndices.shape[1])
        if thread < self.c.tokens:
            choice.sLimit[thread], choice.sQuota[thread], choice.sOpen[thread] = Int32(0), topk, rows
            if rows == 0:
                choice.sQuota[thread] = Int32(0)
        self.start()
        for p in cutlass.range_constexpr(PASSES):
            still = Int32(0)  # the same in all blocks
            for token in cutlass.range_constexpr(self.c.tokens):
                still |= choice.sOpen[token]
            if still != 0:
                for token in cutlass.range_constexpr(self.c.tokens):
                    if choice.sOpen[token] != 0:
                        self.histogram(choice, token, p, count)
                self.barrier()
                for token in cutlass.range_constexpr(self.c.tokens):
                    if choice.sOpen[token] != 0:
                        self.publish(choice, mSums, token, p)
                self.barrier()
                warp = cute.arch.warp_idx()
                for token in cutlass.range_constexpr(self.c.tokens):
                    if warp == token:
                        if choice.sOpen[token] != 0:
                            self.find(choice, mSums, token, p)
                self.barrier()
        self.sum_up(choice, mSums, count)
        self.totals(choice, mSums)
        for token in cutlass.range_constexpr(self.c.tokens):
            self.write(choice, mIndices, token, first, count)
        self.reset_arrivals(mArrivals)

    def key(self, score: Float32) -> Uint32:
        """Unsigned sort key, smaller for larger scores."""
        return Uint32(score_of(Uint32(canonical(score).bitcast(Int32))).bitcast(Int32))

    @cute.jit
    def histogram(self, choice: Choice, token: cutlass.Constexpr, p: cutlass.Constexpr, count: Int32):
        """Count the interval's keys by their next bits."""
        low, counts = Uint32(choice.sLimit[token]), choice.sCounts[None, token].iterator.toint()
        for i in cutlass.range(cute.arch.thread_idx()[0], count, _THREADS, unroll=1):
            bin = (self.key(choice.sScores[i, token]) - low) >> shift_of(p)
            if bin < Uint32(bins_of(p)):
                counters.count(counts + Int32(bin) * 4)

    @cute.jit
    def publish(self, choice: Choice, mSums: cute.Tensor, token: cutlass.Constexpr, p: cutlass.Constexpr):
        """Add this CTA's histogram and its groups' sums to the global ones, and clear it."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        to = mSums.iterator + (token * PASSES + p) * SUMS
        for i in cutlass.range_constexpr(GROUPS // _WARPS):
            group = i * _WARPS + warp
            total = Int32(0)
            for half in cutlass.range_constexpr(GROUP // _LANES):
                bin = group * GROUP + half * _LANES + lane
                bin_count = choice.sCounts[bin, token]
                if bin_count != 0:
                    add(to + bin, bin_count)
                    choice.sCounts[bin, token] = Int32(0)
                total += bin_count
            total = cute.arch.warp_redux_sync(total, "add")
            if (lane == 0) & (total != 0):
                add(to + (BINS + group), total)

    @cute.jit
    def reset_arrivals(self, mArrivals: cute.Tensor):
        """The last CTA leaves the arrival counters zero."""
        if cute.arch.thread_idx()[0] == 0:
            left = op.add_acq_rel((mArrivals.iterator + _LEFT).toint(), Int32(1))
            if left == cute.arch.grid_dim()[0] - 1:
                mArrivals[_ZEROS], mArrivals[_LEFT] = Int32(0), Int32(0)

    @cute.jit
    def find(self, choice: Choice, mSums: cute.Tensor, token: cutlass.Constexpr, p: cutlass.Constexpr):
        """One warp: the bin of the K-th key, from the sums of all CTAs."""
        lane, need, low = cute.arch.lane_idx(), choice.sQuota[token], Uint32(choice.sLimit[token])
        sums = mSums.iterator + (token * PASSES + p) * SUMS
        whole = choice.sOpen[token]
        upto, total = self.wait_complete(sums + (BINS + lane), None, whole)
        group = cutlass.min(lanes_below(upto, need), Int32(_LANES - 1))
        before = cute.arch.shuffle_sync(upto - total, group)
        bins = group * GROUP + 2 * lane
        within, one, two = self.wait_complete(sums + bins, sums + (bins + 1), cute.arch.shuffle_sync(total, group))
        within += before
        found = lanes_below(within, need)  # 32: fewer than asked for
        below = within - two  # the second bin
        second = below < need
        bin = bins + cutlass.select_(second, Int32(1), Int32(0))
        start, inside = low + (Uint32(bin) << shift_of(p)), cutlass.select_(second, two, one)
        need -= cutlass.select_(second, below, below - one)
        if inside == need:  # the bin is wanted whole
            start, need, inside = start + (1 << shift_of(p)), Int32(0), Int32(0)
        if (found == _LANES) | (start >= Uint32(_NONE)):  # what counts is chosen, all of it
            start, need, inside = Uint32(_NONE), Int32(0), Int32(0)
        cute.arch.sync_warp()  # all lanes have read what one of them writes
        if lane == cutlass.min(found, Int32(_LANES - 1)):
            choice.sLimit[token], choice.sQuota[token], choice.sOpen[token] = Int32(start), need, inside

    @cute.jit
    def wait_complete(self, one: cute.Pointer, two: cute.Pointer | None, all_: Int32):
        """One warp: one or two values per lane, once they add up to ``all_``; their running sum first."""
        first, second = Int32(0), Int32(0)
        arrived = all_ - 1
        while arrived != all_:
            first = load_relaxed(one)
            if const_expr(two is not None):
                second = load_relaxed(two)
            arrived = cute.arch.warp_redux_sync(first + second, "add")
        upto = up_to_lane(first + second)
        if const_expr(two is None):
            return upto, first
        return upto, first, second

    @cute.jit
    def share_of_warp(self, count: Int32):
        """(begin, end) of this warp's scores; begin is a multiple of 32."""
        each = (count + (_THREADS - 1)) // _THREADS * _LANES
        begin = cute.arch.warp_idx() * each
        return begin, cutlass.min(begin + each, count)

    @cute.jit
    def marks(self, choice: Choice, token: cutlass.Constexpr, i: Int32, count: Int32):
        """Masks of the 32 keys from ``i`` on: below the limit, equal to it."""
        limit, at = Uint32(choice.sLimit[token]), i + cute.arch.lane_idx()
        key = Uint32(0xFFFFFFFF)
        if at < count:
            key = self.key(choice.sScores[at, token])
        vote = lambda which: Uint32(cute.arch.vote_ballot_sync(which))
        return vote(key < limit), vote(key == limit)

    @cute.jit
    def sum_up(self, choice: Choice, mSums: cute.Tensor, count: Int32):
        """Publish how many entries this CTA has selected."""
        thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
        begin, end = self.share_of_warp(count)
        for token in cutlass.range_constexpr(self.c.tokens):
            more, ties = Int32(0), Int32(0)
            for i in cutlass.range(begin, end, _LANES, unroll=1):
                marks = self.marks(choice, token, i, count)
                more += ones(marks[0])
                ties += ones(marks[1])
            if cute.arch.lane_idx() == 0:
                choice.sChosen[0, warp, token], choice.sChosen[1, warp, token] = more, ties
        self.barrier()
        if thread < 2 * self.c.tokens:
            total = Int32(0)
            for w in cutlass.range_constexpr(_WARPS):
                total += choice.sChosen[thread % 2, w, thread // 2]
            # The buffer is zero before.
            add(mSums.iterator + (self.slot(thread // 2, cute.arch.block_idx()[0]) + thread % 2), total + 1)

    def slot(self, token: Any, block: Int32) -> Int32:
        """Index of a CTA's number of selected entries of a token."""
        return self.c.sums + (token * cute.arch.grid_dim()[0] + block) * 2

    @cute.jit
    def totals(self, choice: Choice, mSums: cute.Tensor):
        """Selected entries of the CTAs before this one, and of all."""
        lane, warp, block = cute.arch.lane_idx(), cute.arch.warp_idx(), cute.arch.block_idx()[0]
        for token in cutlass.range_constexpr(self.c.tokens):
            if warp == token:
                for what in cutlass.range_constexpr(2):
                    before, whole = Int32(0), Int32(0)
                    for i in cutlass.range(lane, cute.arch.grid_dim()[0], _LANES, unroll=1):
                        given = Int32(-1)
                        while given < 0:
                            given = load_relaxed(mSums.iterator + (self.slot(token, i) + what)) - 1
                        whole += given
                        before += cutlass.select_(i < block, given, Int32(0))
                    before, whole = (cute.arch.warp_redux_sync(n, "add") for n in (before, whole))
                    if lane == 0:
                        choice.sBefore[what, token], choice.sAll[what, token] = before, whole
        self.barrier()

    @cute.jit
    def write(
        self, choice: Choice, mIndices: cute.Tensor, token: cutlass.Constexpr, first: Int32, count: Int32
    ):  # fmt: skip
        """Write this CTA's selected indices of a token, and a part of the trailing -1."""
        thread, lane, warp = cute.arch.thread_idx()[0], cute.arch.lane_idx(), cute.arch.warp_idx()
        topk, quota = Int32(mIndices.shape[1]), choice.sQuota[token]
        gIndices = cute.make_tensor(mIndices.iterator + Int64(token) * topk, cute.make_layout(topk))
        more, ties = choice.sBefore[0, token], choice.sBefore[1, token]
        for w in cutlass.range_constexpr(_WARPS - 1):
            more += cutlass.select_(w < warp, choice.sChosen[0, w, token], Int32(0))
            ties += cutlass.select_(w < warp, choice.sChosen[1, w, token], Int32(0))
        at = more + cutlass.min(ties, quota)
        begin, end = self.share_of_warp(count)
        lane_bit = Uint32(1) << Uint32(lane)
        for i in cutlass.range(begin, end, _LANES, unroll=1):
            below, equal = self.marks(choice, token, i, count)
            tied = ((equal & lane_bit) != 0) & (ties + ones(equal & (lane_bit - 1)) < quota)
            chosen = below | Uint32(cute.arch.vote_ballot_sync(tied))
            if (chosen & lane_bit) != 0:
                gIndices[at + ones(chosen & (lane_bit - 1))] = first + i + lane
            at += ones(chosen)
            ties += ones(equal)
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        chosen = choice.sAll[0, token] + cutlass.min(choice.sAll[1, token], quota)
        for i in cutlass.range(chosen + block * _THREADS + thread, topk, blocks * _THREADS, unroll=1):
            gIndices[i] = Int32(-1)


def trace_select(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    *stream, capacity = config
    c = SelectConfig(StreamConfig(*stream), capacity)
    indices = fake.tensor("i32", (fake.dim32(), fake.dim32()), align=4)
    workspace = tuple(fake.tensor("i32", (None,)) for _ in range(2))
    return FusedTopk(c), [*stream_arguments(c.stream), indices, workspace, (Int32(0), Int32(0)), fake.stream()]
