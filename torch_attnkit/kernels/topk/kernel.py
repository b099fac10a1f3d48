"""Top-k of each row by radix select: the indices of the K largest scores in ascending order, ties to the lowest.

A row belongs to a CTA, or to a cluster of 2 to 8; a warp has consecutive scores, held in registers (up to 32 a thread)
or, in the longest rows, read again from L2 for each pass. No warp roles:

    load, convert -> up to 3 passes: count the keys of the open interval by their next 11 bits (``radix_histogram.py``),
    keep the bin that holds the K-th -> mark scores above the limit, and the first ties -> compact, store

A key is an unsigned integer that ascends as the score descends. The search ends where a bin is wanted whole, as nearly
always after 22 bits: then there is no tie to break. Registers hold scores, not keys, since Hopper issues fp32 additions
at twice the rate of integer instructions.

Compaction: each lane has one bit a score; butterfly shuffles transpose these into words of 32 consecutive scores, and
popcounts scanned over lanes, warps and CTAs are positions in the output. Nothing is sorted.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import bits, copies, fake, l2, warp_scan
from torch_attnkit.cuda.ring import Fixed

from .plan import LANES, Config
from .radix_histogram import BITS, Histogram

_NONE = 0xFF800000  # the key of -inf, NaN and a missing entry: above all others, and the first of a bin
_FEW = 8  # chosen of 32 scores, up to which each lane stores its own
_PLUS = 0x7FFFFFFF  # the key of 0 and of no lesser number
# Leading bits of a key that passes look at: scores of 16 bits differ in 19 at most.
_KEY_BITS = {16: 2 * BITS, 32: 32}


def canonical(x: Float32) -> Float32:
    """The same score, 0 for -0 and -inf for NaN."""
    return cute.arch.fmax(x + Float32(0), -Float32.inf)


def score_of(key: Uint32) -> Float32:
    """The score with this key. A key is the score's bits, of scores that are not negative inverted but for the sign: it
    ascends as the score descends. The map is its own inverse."""
    word = Int32(key)
    return (word ^ (~(word >> 31) & _PLUS)).bitcast(Float32)


def ones(word: Uint32) -> Int32:
    """How many bits of a word are set."""
    return Int32(cute.arch.popc(word))


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
    """``part``: entries of the parts of which rows are made, each of which has results of its own; 0: none. ``listed``:
    entries of a row are those that a list names, in ascending order, -1 for none."""

    def __init__(self, config: Config, width: int, part: int, listed: bool):
        self.c, self.key_bits = config, _KEY_BITS[width]
        self.part, self.listed = part, listed
        self.passes = -(-self.key_bits // BITS)
        self.bins = Histogram(config, self.passes)

    @cute.jit
    def __call__(
        self,
        mScores: cute.Tensor,  # (T, S)
        mLength: cute.Tensor | None,  # (T,)
        mList: cute.Tensor | None,  # (T, L), contiguous
        mIndices: cute.Tensor,  # (T, K), contiguous; (T * parts, K)
        ahead: Int32,  # rows that the machine works on at a time
        stream: cuda.CUstream,
    ):
        c = self.c
        self.kernel(mScores, mLength, mList, mIndices, ahead).launch(
            grid=(Int32(mIndices.shape[0]) * c.cluster, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self, mScores: cute.Tensor, mLength: cute.Tensor | None, mList: cute.Tensor | None, mIndices: cute.Tensor,
        ahead: Int32,
    ):  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank, row = block % c.cluster, block // c.cluster
        self.setup()
        scores, origin, length = self.row(mScores, mLength, row)
        ids, topk = None, Int32(mIndices.shape[1])  # ids: of a list's entries
        if const_expr(self.listed):
            ids, length = mList.iterator + Int64(row) * mList.stride[0], Int32(mList.shape[1])
        tiles = Int32(1)
        if const_expr(not c.resident):
            whole = const_expr(c.cluster * c.warps * c.tile)
            tiles = (length + (whole - 1)) // whole
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = (rank * c.warps + warp) * (tiles * c.tile)
        rScores = cute.make_rmem_tensor(c.width * c.vectors, Float32)
        rFetched = copies.fragments(c.vectors, c.width, Int32 if self.listed else mScores.element_type)
        if const_expr(c.resident):
            self.fetch(ids if const_expr(self.listed) else scores, length, first, rFetched)
        if length > topk:
            self.bins.clear()  # while the loads are in flight
        if const_expr(self.listed):
            rFetched = self.gather(scores, rFetched)
        if const_expr(c.resident):
            self.convert(rFetched, length, first, rScores)
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()  # the peers' mbarriers are initialised
        if const_expr(not self.listed):
            if row + ahead < mIndices.shape[0]:
                self.prefetch(mScores, mLength, row + ahead, rank)

        part = (scores, length, first, tiles)
        above, level, quota = Float32(-Float32.inf), Float32(0), Int32(0)
        if length > topk:
            above, level, quota = self.select(part, topk, rank, rScores)
        limits = (above, level, quota)
        kept = self.marks(rScores, limits) if const_expr(c.resident) else None
        more, ties, all_more, all_ties = self.count(part, rScores, kept, limits, rank)
        gIndices = cute.make_tensor(mIndices.iterator + Int64(row) * topk, cute.make_layout(topk))
        at = more + cutlass.min(ties, quota)
        if all_more == length:  # all of the row, as of rows that have no more entries than are asked for
            for i in cutlass.range(rank * c.threads + thread, length, c.threads * c.cluster, unroll=1):
                gIndices[i] = copies.scalar(ids + i) if const_expr(self.listed) else origin + i
        else:
            for tile in cutlass.range(tiles, unroll=1):
                start = first + tile * c.tile
                marks = self.marks_of(part, start, rScores, kept, limits)
                at, ties = self.write(gIndices, ids, origin, marks, quota, start, at, ties)
        chosen = all_more + cutlass.min(all_ties, quota)
        for i in cutlass.range(chosen + rank * c.threads + thread, topk, c.threads * c.cluster, unroll=1):
            gIndices[i] = Int32(-1)

    @cute.jit
    def row(self, mScores: cute.Tensor, mLength: cute.Tensor | None, row: Int32):
        """A row, or part of one: its scores, the number of its first entry, and how many entries count."""
        length, origin = Int32(mScores.shape[1]), Int32(0)
        if const_expr(self.part):
            parts = Uint32(length + const_expr(self.part - 1)) // self.part
            origin = Int32(Uint32(row) % parts) * self.part
            row = Int32(Uint32(row) // parts)
        if const_expr(mLength is not None):
            length = cutlass.max(cutlass.min(Int32(mLength[row]), length), Int32(0))
        if const_expr(self.part):
            length = cutlass.max(cutlass.min(length - origin, self.part), Int32(0))
        return mScores.iterator + (Int64(row) * mScores.stride[0] + origin), origin, length

    @cute.jit
    def prefetch(self, mScores: cute.Tensor, mLength: cute.Tensor | None, row: Int32, rank: Int32):
        """Prefetch a row that a CTA will soon work on to L2."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        line = const_expr(l2.LINE // (mScores.element_type.width // 8))
        scores, _, length = self.row(mScores, mLength, row)
        first, step = (rank * c.threads + thread) * line, c.cluster * c.threads * line
        for at in cutlass.range(first, length, step, unroll=1):
            l2.prefetch((scores + at).toint())

    def setup(self) -> None:
        """Shared memory."""
        allocator = cutlass.memory.SmemAllocator()
        self.bins.setup(allocator)
        self.sWarps = allocator.allocate_tensor(Int32, cute.make_layout((LANES, 2)), byte_alignment=16)

    @cute.jit
    def fetch(self, scores: Any, length: Int32, start: Int32, rScores: Any):
        """This lane's part of a tile that begins at ``start``: ``vectors`` loads."""
        c = self.c
        at = start + cute.arch.lane_idx() * c.width
        for v in cutlass.range_constexpr(c.vectors):
            rScores[v].fill(0)
            if at + v * LANES * c.width < length:
                copies.load(scores + (at + v * LANES * c.width), rScores[v])

    @cute.jit
    def gather(self, scores: Any, rIds: Any):
        """The scores of entries by their ids."""
        rFetched = copies.fragments(self.c.vectors, self.c.width, Float32)
        for v in cutlass.range_constexpr(self.c.vectors):
            for e in cutlass.range_constexpr(self.c.width):
                rFetched[v][e] = -Float32.inf
                if rIds[v][e] >= 0:
                    rFetched[v][e] = copies.scalar(scores + rIds[v][e]).to(Float32)
        return rFetched

    @cute.jit
    def convert(self, rFetched: Any, length: Int32, start: Int32, rScores: cute.Tensor):
        """The loaded scores in canonical form, -inf behind the length."""
        c = self.c
        for e in cutlass.range_constexpr(c.vectors * c.width):
            rScores[e] = canonical(rFetched[e // c.width][e % c.width].to(Float32))
        if start + c.tile > length:
            at = start + cute.arch.lane_idx() * c.width
            for e in cutlass.range_constexpr(c.vectors * c.width):
                if at + (e // c.width * LANES * c.width + e % c.width) >= length:
                    rScores[e] = -Float32.inf

    def load(self, scores: Any, length: Int32, start: Int32, rScores: cute.Tensor) -> None:
        """This lane's part of a tile that begins at ``start``, in canonical form."""
        rFetched = copies.fragments(self.c.vectors, self.c.width, scores.value_type)
        self.fetch(scores, length, start, rFetched)
        self.convert(rFetched, length, start, rScores)

    @cute.jit
    def select(self, row: Any, topk: Int32, rank: Int32, rScores: cute.Tensor):
        """What is chosen: all scores above a limit, and ``quota`` of those that tie with a level, the first ones."""
        scores, length, first, tiles = row
        limit, quota = Uint32(_NONE), Int32(0)  # of keys: all below, and of those that equal it
        low = Uint32(0)  # of the interval in which the key is that was asked for
        need = topk  # its rank among the keys of the interval
        open_ = Int32(1)
        cute.arch.barrier()  # the counters are zero
        for p in cutlass.range_constexpr(self.passes):
            shift = const_expr(max(0, 32 - BITS * (p + 1)))
            if open_ != 0:
                for tile in cutlass.range(tiles, unroll=1):
                    if const_expr(not self.c.resident):
                        self.load(scores, length, first + tile * self.c.tile, rScores)
                    self.tally(rScores, p, shift, low)
                bin_, before, count = self.bins.find(p, need, rank)
                absent = cutlass.Boolean(False)
                if const_expr(p == 0):
                    absent = bin_ >= (_NONE >> shift)
                if absent:
                    open_ = Int32(0)  # fewer than asked for: all are chosen
                else:
                    low += Uint32(bin_) << shift
                    need -= before
                    limit, quota = low, need
                    if count == need:
                        limit, quota, open_ = low + (1 << shift), Int32(0), Int32(0)
        # A number that equals the limit has zeros in the bits that no pass looked at. -0, whose key no number has,
        # stands for the number behind it, since it is not less than 0.
        level = Int32(score_of(limit).bitcast(Int32) & -(1 << (32 - self.key_bits))).bitcast(Float32)
        above = score_of(limit + cutlass.select_(limit == _PLUS + 1, Uint32(1), Uint32(0)))
        return above, level, quota

    @cute.jit
    def tally(self, rScores: cute.Tensor, p: int, shift: int, low: Uint32):
        """Count this lane's scores: in the first pass by their leading bits, then by how far their keys are behind
        ``low``."""
        # The key of a positive number is the greatest less its bits: one multiplication and addition for either sign.
        sign, origin = Int32(1), -Int32(low)
        if low <= _PLUS:
            sign, origin = Int32(-1), _PLUS - Int32(low)
        for e in cutlass.range_constexpr(cute.size(rScores)):
            word = rScores[e].bitcast(Int32)
            beyond = Uint32(word) if const_expr(p == 0) else Uint32(word * sign + origin)
            self.bins.count(p, beyond >> shift)

    @cute.jit
    def of_warps(self, what: int, warps: Int32):
        """The sum of what the first ``warps`` warps wrote."""
        lane, part = cute.arch.lane_idx(), Int32(0)
        if lane < warps:
            part = self.sWarps[lane, what]
        return cute.arch.warp_redux_sync(part, "add")

    @cute.jit
    def marks(self, rScores: cute.Tensor, limits: Any):
        """Which of this lane's scores are above the limit, and the ties, if any are wanted; bit e for score e."""
        above, level, quota = limits
        more, ties = Int32(0), Uint32(0)
        for i in cutlass.range_constexpr(cute.size(rScores)):
            # The sign of a difference is the mark: a subtraction and a shift.
            more = bits.shift_in(more, (above - rScores[cute.size(rScores) - 1 - i]).bitcast(Int32))
        if quota > 0:
            for e in cutlass.range_constexpr(cute.size(rScores)):
                ties |= Uint32(cutlass.select_(rScores[e] == level, Uint32(1 << e), Uint32(0)))
        return Uint32(more), ties

    def marks_of(self, row: Any, start: Int32, rScores: cute.Tensor, kept: Any, limits: Any) -> Any:
        """The marks of the tile that begins at ``start``: in registers, or of scores loaded again."""
        if self.c.resident:
            return kept
        self.load(*row[:2], start, rScores)
        return self.marks(rScores, limits)

    @cute.jit
    def count(self, row: Any, rScores: cute.Tensor, kept: Any, limits: Any, rank: Int32):
        """Scores above the limit and ties: before this warp's part of the row, and in all of the row."""
        c = self.c
        _, _, first, tiles = row
        more, ties = Int32(0), Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            marks = self.marks_of(row, first + tile * c.tile, rScores, kept, limits)
            more += ones(marks[0])
            ties += ones(marks[1])
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        more, ties = (cute.arch.warp_redux_sync(n, "add") for n in (more, ties))
        if lane == 0:
            self.sWarps[warp, 0], self.sWarps[warp, 1] = more, ties
        cute.arch.barrier()
        before = [self.of_warps(i, warp) for i in range(2)]
        whole = [self.of_warps(i, Int32(c.warps)) for i in range(2)]
        if const_expr(c.cluster > 1):
            *earlier, whole_more, whole_ties = self.bins.totals(whole, rank)
            before = [before[i] + earlier[i] for i in range(2)]
            whole = [whole_more, whole_ties]
        return *before, *whole

    @cute.jit
    def write(
        self, gIndices: Any, ids: Any, origin: Int32, marks: Any, quota: Int32, start: Int32, at: Int32, ties: Int32
    ):
        """Store the indices of a tile's chosen scores, from output ``at`` on, ``ties`` ties after the first. Returns
        both for the next tile."""
        low, equal = marks
        word = self.in_order(low)
        if quota > 0:
            tied = self.in_order(equal)
            n = ones(tied)
            upto = warp_scan.up_to_lane(n)
            allowed = cutlass.max(quota - (ties + upto - n), Int32(0))
            while ones(tied) > allowed:
                tied = tied & ~(Uint32(1) << Uint32(31 - cute.arch.clz(Int32(tied))))
            word |= tied
            ties += cute.arch.shuffle_sync(upto, LANES - 1)
        n = ones(word)
        upto = warp_scan.up_to_lane(n)
        lane = cute.arch.lane_idx()
        position, entry = at + upto - n, start + lane * LANES
        if cute.arch.warp_redux_sync(n, "max") > _FEW:
            # Word by word, a lane for each bit: consecutive positions are stored together.
            for i in cutlass.range(LANES, unroll=4):
                all_, to = Uint32(cute.arch.shuffle_sync(word, i)), cute.arch.shuffle_sync(position, i)
                if (all_ >> lane) & 1 != 0:
                    index = start + i * LANES + lane
                    value = copies.scalar(ids + index) if const_expr(self.listed) else origin + index
                    gIndices[to + ones(all_ & ((Uint32(1) << lane) - 1))] = value
        else:
            while word != 0:
                index = entry + ones(~word & (word - 1))
                gIndices[position] = copies.scalar(ids + index) if const_expr(self.listed) else origin + index
                word = word & (word - 1)
                position += 1
        return at + cute.arch.shuffle_sync(upto, LANES - 1), ties

    def in_order(self, bits: Uint32) -> Uint32:
        """The lanes' bits as words of 32 scores that follow one another, lane after lane."""
        width, lane = self.c.width, cute.arch.lane_idx()
        # Lane j of 32 / width neighbours now has what they had in block j; their next blocks lie ``width`` words on.
        word = transposed(bits, width)
        return Uint32(cute.arch.shuffle_sync(word, lane % width * (LANES // width) + lane // width))


def trace(
    arch: str, dtype: str, ragged: bool, config: tuple[int, ...], part: int = 0, listed: bool = False
) -> tuple[Any, list[Any]]:
    c, rows, size = Config(*config), fake.dim32(), fake.dtype(dtype).width // 8
    results = fake.dim32() if part else rows
    arguments = [
        fake.tensor(dtype, (rows, None), align=size if listed else c.width * size),
        fake.tensor("i32", (rows,), (None,), align=4) if ragged else None,
        fake.tensor("i32", (rows, None), align=4 * c.width) if listed else None,
        fake.tensor("i32", (results, None), align=4),
        Int32(0),
        fake.stream(),
    ]
    return _TopK(c, 8 * size, part, listed), arguments
