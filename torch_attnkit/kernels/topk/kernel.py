"""Device side of top-k: which scores of a row are among the K largest, by radix select, in ascending order of place.

A warp has scores that follow one another, and so has a block of a cluster. Scores become keys, unsigned integers of
which the smallest belongs to the largest score. Up to three times the block counts the keys of the interval in which
the K-th smallest lies by their next 11 bits (a histogram in shared memory, summed over the cluster), and goes on with
the bin that has it. Where a bin is wanted whole, as nearly always after 22 bits, no tie is left to break.

Then each lane has a bit for each of its scores. Exchanged among lanes, these become words of 32 scores that follow
one another, and counts of bits, summed over lanes, warps and blocks, are places in the output.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies, counters, fake, l2
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed

from .plan import LANES, Config

_BITS = (11, 11, 10)  # of a key, that one pass decides
_BINS = 2048
_NONE = 0xFF800000  # the key of -inf, NaN and an entry that is not there: above all others, and the first of a bin
# What a pass has found, in shared memory.
_BIN, _BEFORE, _COUNT, _FACTS = 0, 1, 2, 4


def key(x: Float32) -> Uint32:
    """An integer that is smaller the larger the number is, and the same for 0 and -0; ``_NONE`` for -inf and NaN."""
    bits = cute.arch.fmax(x + Float32(0), -Float32.inf).bitcast(Int32)
    return Uint32(bits ^ (~(bits >> 31) & 0x7FFFFFFF))


def ones(word: Uint32) -> Int32:
    """How many bits of a word are set."""
    return Int32(cute.arch.popc(word))


@cute.jit
def running_sum(value: Int32):
    """The sum over this lane and those below it."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step)
        value += cutlass.select_(lane >= (1 << step), below, Int32(0))
    return value


def transposed(word: Uint32, width: int) -> Uint32:
    """Blocks of ``width`` bits exchanged among ``32 / width`` neighbouring lanes: block i of lane j goes to block j of
    lane i."""
    lane, count = cute.arch.lane_idx(), LANES // width
    step = 1
    while step < count:
        shift = step * width
        low = Uint32(sum(((1 << width) - 1) << (b * width) for b in range(count) if not b & step))
        other = Uint32(cute.arch.shuffle_sync_bfly(word, offset=step))
        upper = (word & ~low) | ((other >> shift) & low)
        word = Uint32(cutlass.select_((lane & step) != 0, upper, (word & low) | ((other & low) << shift)))
        step *= 2
    return word


class _TopK(Fixed):
    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def __call__(
        self,
        mScores: cute.Tensor,  # (T, S)
        mLength: cute.Tensor | None,  # (T,)
        mIndices: cute.Tensor,  # (T, K), contiguous
        ahead: Int32,  # rows that the machine works on at a time
        stream: cuda.CUstream,
    ):
        c = self.c
        self.kernel(mScores, mLength, mIndices, ahead).launch(
            grid=(Int32(mScores.shape[0]) * c.cluster, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mLength: cute.Tensor | None, mIndices: cute.Tensor, ahead: Int32):
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank, row = block % c.cluster, block // c.cluster
        length, topk = self.length(mScores, mLength, row), Int32(mIndices.shape[1])
        self.setup()
        scores = mScores.iterator + Int64(row) * mScores.stride[0]
        tiles = Int32(1)
        if const_expr(not c.resident):
            whole = const_expr(c.cluster * c.warps * c.tile)
            tiles = (length + (whole - 1)) // whole
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = (rank * c.warps + warp) * (tiles * c.tile)
        rKeys = cute.make_rmem_tensor(c.width * c.vectors, Uint32)
        if const_expr(c.resident):
            self.load(scores, length, first, rKeys)
        if row + ahead < mScores.shape[0]:
            self.prefetch(mScores, mLength, row + ahead, rank)

        # All below ``limit`` are chosen, and of those that equal it the first ``quota``.
        limit, quota = Uint32(_NONE), Int32(0)
        if length > topk:
            limit, quota = self.select(scores, length, topk, first, tiles, rKeys)
        kept = self.marks(rKeys, limit, quota) if const_expr(c.resident) else None
        part = (scores, length, first, tiles)
        less, ties, all_less, all_ties = self.count(part, rKeys, kept, limit, quota, rank)
        gIndices = cute.make_tensor(mIndices.iterator + Int64(row) * topk, cute.make_layout(topk))
        at = less + cutlass.min(ties, quota)
        for tile in cutlass.range(tiles, unroll=1):
            start = first + tile * c.tile
            marks = self.marks_of(part, start, rKeys, kept, limit, quota)
            at, ties = self.write(gIndices, marks, quota, start, at, ties)
        chosen = all_less + cutlass.min(all_ties, quota)
        for i in cutlass.range(chosen + rank * c.threads + thread, topk, c.threads * c.cluster, unroll=1):
            gIndices[i] = Int32(-1)
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()  # nobody reads this block's memory any more

    @cute.jit
    def length(self, mScores: cute.Tensor, mLength: cute.Tensor | None, row: Int32):
        """How many entries of a row count."""
        length = Int32(mScores.shape[1])
        if const_expr(mLength is not None):
            length = cutlass.max(cutlass.min(Int32(mLength[row]), length), Int32(0))
        return length

    @cute.jit
    def prefetch(self, mScores: cute.Tensor, mLength: cute.Tensor | None, row: Int32, rank: Int32):
        """Bring a row on which a block will soon work to the second-level cache."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        line = const_expr(l2.LINE // (mScores.element_type.width // 8))
        scores = mScores.iterator + Int64(row) * mScores.stride[0]
        first, step = (rank * c.threads + thread) * line, c.cluster * c.threads * line
        for at in cutlass.range(first, self.length(mScores, mLength, row), step, unroll=1):
            l2.prefetch((scores + at).toint())

    @cute.jit
    def setup(self):
        """Shared memory; its counters are zero after the next barrier."""
        c = self.c
        allocator = cutlass.memory.SmemAllocator()
        shapes = ((_BINS, len(_BITS)), (_FACTS, len(_BITS)), (LANES, 2 + len(_BITS)), (2, 1))
        self.sCounts, self.sFacts, self.sWarps, self.sBlock = (
            allocator.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16) for shape in shapes
        )
        thread, _, _ = cute.arch.thread_idx()
        for sZero in (self.sCounts, self.sFacts):
            for i in cutlass.range(thread, cute.size(sZero) // 4, c.threads, unroll=1):
                copies.store_words(sZero.iterator.toint() + 16 * i, [Int32(0)] * 4, cute.AddressSpace.smem)

    def meet(self) -> None:
        """A barrier of all threads that share the row."""
        if self.c.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def load(self, scores: Any, length: Int32, start: Int32, rKeys: cute.Tensor):
        """The keys of this lane's part of a tile that begins at ``start``."""
        c = self.c
        at = start + cute.arch.lane_idx() * c.width
        rScores = copies.fragments(c.vectors, c.width, scores.value_type)
        for v in cutlass.range_constexpr(c.vectors):
            rScores[v].fill(0)
            if at + v * LANES * c.width < length:
                copies.load(scores + (at + v * LANES * c.width), rScores[v])
        for e in cutlass.range_constexpr(c.vectors * c.width):
            rKeys[e] = key(rScores[e // c.width][e % c.width].to(Float32))
        if start + c.tile > length:
            for e in cutlass.range_constexpr(c.vectors * c.width):
                if at + (e // c.width * LANES * c.width + e % c.width) >= length:
                    rKeys[e] = Uint32(_NONE)

    @cute.jit
    def select(self, scores: Any, length: Int32, topk: Int32, first: Int32, tiles: Int32, rKeys: cute.Tensor):
        """The key up to which everything is chosen, and how many of those that equal it are, too."""
        limit, quota = Uint32(_NONE), Int32(0)
        low = Uint32(0)  # of the interval in which the key is that was asked for
        need = topk  # its place among the keys of the interval
        open_ = Int32(1)
        shift = const_expr(32)
        cute.arch.barrier()  # the counters are zero
        for p in cutlass.range_constexpr(len(_BITS)):
            shift = const_expr(shift - _BITS[p])
            if open_ != 0:
                for tile in cutlass.range(tiles, unroll=1):
                    if const_expr(not self.c.resident):
                        self.load(scores, length, first + tile * self.c.tile, rKeys)
                    self.tally(rKeys, p, shift, low)
                found, before, count = self.find(p, need)
                absent = cutlass.Boolean(False)
                if const_expr(p == 0):
                    absent = found >= (_NONE >> shift)
                if absent:
                    open_ = Int32(0)  # fewer than asked for: all are chosen
                else:
                    low += Uint32(found) << shift
                    need -= before
                    limit, quota = low, need
                    if count == need:
                        limit, quota, open_ = low + (1 << shift), Int32(0), Int32(0)
        return limit, quota

    @cute.jit
    def tally(self, rKeys: cute.Tensor, p: int, shift: int, low: Uint32):
        """Count this lane's keys by bins of 2^shift; after the first pass those of the interval alone."""
        first = self.sCounts[None, p].iterator.toint()
        for e in cutlass.range_constexpr(cute.size(rKeys)):
            beyond = rKeys[e] - low
            counter = first + Int32(beyond >> shift) * 4
            if const_expr(p == 0):
                counters.count(counter)
            else:
                counters.count_if(counter, beyond < (1 << (shift + _BITS[p])))

    @cute.jit
    def find(self, p: int, need: Int32):
        """The bin with the ``need``-th key, how many keys are below it and in it."""
        c = self.c
        self.meet()  # all keys of the row are counted
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        each = const_expr(_BINS // c.threads)  # bins of a thread
        rCounts = cute.make_rmem_tensor(each, Int32)
        sMine = cute.local_tile(self.sCounts[None, p], (each,), (thread,))
        if const_expr(c.cluster == 1):
            cute.autovec_copy(sMine, rCounts)
        else:
            rCounts.fill(0)
            for peer in cutlass.range_constexpr(c.cluster):
                for i in cutlass.range_constexpr(0, each, 2):
                    at = op.cluster_address(sMine.iterator.toint() + 4 * i, Int32(peer))
                    low, high = counters.load_2_of_cluster(at)
                    rCounts[i] += low
                    rCounts[i + 1] += high
        mine = Int32(0)
        for i in cutlass.range_constexpr(each):
            mine += rCounts[i]
        upto = running_sum(mine)
        if lane == LANES - 1:
            self.sWarps[warp, 2 + p] = upto
        cute.arch.barrier()
        before = self.of_warps(2 + p, warp) + upto - mine
        if (before < need) & (need <= before + mine):
            for i in cutlass.range_constexpr(each):
                if (before < need) & (need <= before + rCounts[i]):
                    self.sFacts[_BIN, p] = thread * each + i
                    self.sFacts[_BEFORE, p] = before
                    self.sFacts[_COUNT, p] = rCounts[i]
                before += rCounts[i]
        cute.arch.barrier()
        return self.sFacts[_BIN, p], self.sFacts[_BEFORE, p], self.sFacts[_COUNT, p]

    @cute.jit
    def of_warps(self, what: int, warps: Int32):
        """The sum of what the first ``warps`` warps wrote."""
        lane, part = cute.arch.lane_idx(), Int32(0)
        if lane < warps:
            part = self.sWarps[lane, what]
        return cute.arch.warp_redux_sync(part, "add")

    @cute.jit
    def marks(self, rKeys: cute.Tensor, limit: Uint32, quota: Int32):
        """This lane's scores below the limit, and the ties, if any are wanted; bit e for score e."""
        less, ties = Uint32(0), Uint32(0)
        for e in cutlass.range_constexpr(cute.size(rKeys)):
            less |= Uint32(cutlass.select_(rKeys[e] < limit, Uint32(1 << e), Uint32(0)))
        if quota > 0:
            for e in cutlass.range_constexpr(cute.size(rKeys)):
                ties |= Uint32(cutlass.select_(rKeys[e] == limit, Uint32(1 << e), Uint32(0)))
        return less, ties

    def marks_of(self, row: Any, start: Int32, rKeys: cute.Tensor, kept: Any, limit: Uint32, quota: Int32) -> Any:
        """The marks of the tile that begins at ``start``: what was kept, or from scores read anew."""
        if self.c.resident:
            return kept
        self.load(*row[:2], start, rKeys)
        return self.marks(rKeys, limit, quota)

    @cute.jit
    def count(self, row: Any, rKeys: cute.Tensor, kept: Any, limit: Uint32, quota: Int32, rank: Int32):
        """Scores below the limit and ties: before this warp's part of the row, and in all of the row."""
        c = self.c
        _, _, first, tiles = row
        less, ties = Int32(0), Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            marks = self.marks_of(row, first + tile * c.tile, rKeys, kept, limit, quota)
            less += ones(marks[0])
            ties += ones(marks[1])
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        less, ties = (cute.arch.warp_redux_sync(n, "add") for n in (less, ties))
        if lane == 0:
            self.sWarps[warp, 0], self.sWarps[warp, 1] = less, ties
        cute.arch.barrier()
        before = [self.of_warps(i, warp) for i in range(2)]
        whole = [self.of_warps(i, Int32(c.warps)) for i in range(2)]
        if const_expr(c.cluster > 1):
            thread, _, _ = cute.arch.thread_idx()
            if thread == 0:
                self.sBlock[0, 0], self.sBlock[1, 0] = whole
            self.meet()
            peer = cutlass.min(lane, Int32(c.cluster - 1))
            blocks = counters.load_2_of_cluster(op.cluster_address(self.sBlock.iterator.toint(), peer))
            cute.arch.cluster_arrive()  # the last look at another block's memory
            for i in cutlass.range_constexpr(2):
                earlier = cutlass.select_(lane < rank, blocks[i], Int32(0))
                before[i] += cute.arch.warp_redux_sync(earlier, "add")
                whole[i] = cute.arch.warp_redux_sync(cutlass.select_(lane < c.cluster, blocks[i], Int32(0)), "add")
        return *before, *whole

    @cute.jit
    def write(self, gIndices: Any, marks: Any, quota: Int32, start: Int32, at: Int32, ties: Int32):
        """The places of a tile's chosen scores, from output ``at`` on, ``ties`` ties after the row's first. Returns
        both for the next tile."""
        low, equal = marks
        word = self.in_order(low)
        if quota > 0:
            tied = self.in_order(equal)
            n = ones(tied)
            upto = running_sum(n)
            room = cutlass.max(quota - (ties + upto - n), Int32(0))
            while ones(tied) > room:
                tied = tied & ~(Uint32(1) << Uint32(31 - cute.arch.clz(Int32(tied))))
            word |= tied
            ties += cute.arch.shuffle_sync(upto, LANES - 1)
        n = ones(word)
        upto = running_sum(n)
        place, entry = at + upto - n, start + cute.arch.lane_idx() * LANES
        while word != 0:
            gIndices[place] = entry + ones(~word & (word - 1))
            word = word & (word - 1)
            place += 1
        return at + cute.arch.shuffle_sync(upto, LANES - 1), ties

    def in_order(self, bits: Uint32) -> Uint32:
        """The lanes' bits as words of 32 scores that follow one another, lane after lane."""
        width, lane = self.c.width, cute.arch.lane_idx()
        # Lane j of 32 / width neighbours now has what they had in block j; their next blocks lie ``width`` words on.
        word = transposed(bits, width)
        return Uint32(cute.arch.shuffle_sync(word, lane % width * (LANES // width) + lane // width))


def trace(arch: str, dtype: str, ragged: bool, config: tuple[int, ...]) -> tuple[Any, list[Any]]:
    c, rows = Config(*config), fake.dim32()
    arguments = [
        fake.tensor(dtype, (rows, None), align=c.width * fake.dtype(dtype).width // 8),
        fake.tensor("i32", (rows,), (None,), align=4) if ragged else None,
        fake.tensor("i32", (rows, None), align=4),
        Int32(0),
        fake.stream(),
    ]
    return _TopK(c), arguments
