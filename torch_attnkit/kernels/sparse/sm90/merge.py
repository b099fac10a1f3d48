"""How the CTAs that share a work tile's keys join what they have.

    each CTA       its output, normalised and rounded to the call's dtype as P was, to those that add up its rows
    each cluster   a CTA adds up its share of the rows, which have come (inbox.py) -> result, or a split in float32
    the clusters   the CTAs with the same share count themselves: the last adds up the splits, in their order

Normalised, a sum of many keys does not leave the range of float16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2

from .arguments import Numbers, Tensors
from .config import CONSUMER_THREADS, CONSUMERS, Config
from .fp4_output import Fp4Output
from .inbox import Inbox, load_shared_floats
from .meeting import Meeting, meet
from .output import Output, factor_beside, sink_of
from .places import LANES
from .plan import MOST_CTAS
from .schedule import WorkTile

_INF = float("inf")
_AT_ONCE = 4  # splits on their way


def _warp() -> Int32:
    """Of the consumers."""
    return cute.arch.thread_idx()[0] // LANES


class Merge:
    """For all consumers of a CTA; ``part`` says which CTA of the work tile it is."""

    def __init__(self, config: Config, output: Output | Fp4Output):
        self.c, self.output = config, output
        self.chunks = config.dim * config.itemsize // CHUNK  # of a row

    @cute.jit
    def run(
        self, tensors: Tensors, numbers: Numbers, tile: WorkTile, index: Int32, part: Int32, inbox: Inbox,
        shared: Int32, meeting: Meeting,
    ):  # fmt: skip
        """Work tile number ``index``, of which the CTA has sent its part."""
        first = tensors.splits.iterator.toint() + Int64(index * numbers.groups) * self.c.split.nbytes
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(meeting.come, inbox.expected(tile))
        # The sink of the warp's first row is on its way while others' parts are.
        sink = sink_of(tensors, numbers, tile.head + cutlass.min(inbox.row(_warp()), tile.heads - 1))
        cute.arch.mbarrier_wait(meeting.come, 0)
        cute.arch.cluster_arrive_relaxed()
        split = first + Int64(part // numbers.ctas) * self.c.split.nbytes
        for number in cutlass.range(_warp(), inbox.rows(tile), CONSUMERS, unroll=1):
            self._row(tensors, numbers, tile, inbox, number, sink, split)
            sink = sink_of(tensors, numbers, tile.head + cutlass.min(inbox.row(number + CONSUMERS), tile.heads - 1))
        if numbers.groups > 1:
            self._count(tensors, numbers, index, inbox, shared, meeting)
            if meeting.info(shared)[1] != 0:
                self._splits(tensors, numbers, tile, inbox, first)

    def _first(self) -> Int32:
        """The first of this thread's chunks of the CTA's rows, which are the same in every cluster."""
        return cute.arch.thread_idx()[0] % CONSUMER_THREADS

    def _end(self, inbox: Inbox, tile: WorkTile) -> Int32:
        """Of all threads' chunks. Warps are whole, as some results are of several lanes."""
        return (inbox.rows(tile) * self.chunks + (LANES - 1)) // LANES * LANES

    def _place(self, inbox: Inbox, tile: WorkTile, index: Int32) -> tuple[Int32, Int32, Boolean]:
        """The number among the CTA's rows and that of chunk ``index`` in it, and whether there is such a row; else it
        is the last."""
        number, rows = index // self.chunks, inbox.rows(tile)
        there = Boolean(True) if self.chunks % LANES == 0 else number < rows
        return cutlass.min(number, rows - 1), index % self.chunks, there

    @cute.jit
    def _row(
        self, tensors: Tensors, numbers: Numbers, tile: WorkTile, inbox: Inbox, number: Int32, sink: Float32,
        split: Int64,
    ):  # fmt: skip
        """One of the CTA's rows by a warp: the sum over the cluster, eight columns a lane at a time; to ``split`` where
        there are more clusters. Lane i knows what CTA i weighs."""
        c, lane, row = self.c, cute.arch.lane_idx(), inbox.row(number)
        columns, turns = const_expr(CHUNK // c.itemsize), const_expr(-(-self.chunks // LANES))
        at = inbox.found(cutlass.min(lane, numbers.ctas - 1), number)
        top, part_sum = load_shared_floats(2, at + c.dim * c.itemsize)
        top = cutlass.select_(lane < numbers.ctas, top, Float32(-_INF))
        row_max = top
        for distance in cutlass.range_constexpr(3):
            row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=1 << distance))
        row_max = cute.arch.shuffle_sync(row_max, 0)
        weight, row_sum = exp2(top - finite(row_max)) * part_sum, Float32(0.0)
        chunks = [cutlass.min(lane + i * LANES, self.chunks - 1) for i in range(turns)]
        sums = [cute.make_rmem_tensor(columns, Float32) for _ in range(turns)]
        for rSum in sums:
            rSum.fill(0.0)
        rPart = cute.make_rmem_tensor(4, Float32)
        rValues = cute.recast_tensor(rPart, c.dtype)
        for i in cutlass.range(numbers.ctas, unroll=1):
            mine, there = cute.arch.shuffle_sync(weight, i), cute.arch.shuffle_sync(at, i)
            row_sum += mine
            parts = [load_shared_floats(4, there + chunk * CHUNK) for chunk in chunks]
            for rSum, part in zip(sums, parts, strict=True):
                for x in cutlass.range_constexpr(4):
                    rPart[x] = part[x]
                for x in cutlass.range_constexpr(columns):
                    rSum[x] = rSum[x] + mine * rValues[x].to(Float32)
        for rSum, i in zip(sums, range(turns), strict=True):
            chunk, values = chunks[i], [rSum[x] for x in range(columns)]
            there = Boolean(True) if const_expr(self.chunks % LANES == 0) else lane < self.chunks
            if numbers.groups == 1:
                self._store(tensors, numbers, tile, row, there, chunk, values, sink, row_max, row_sum)
            elif there:
                for x in cutlass.range_constexpr(0, columns, 4):
                    op.store_4_floats(split + c.split.output_at(row, chunk * columns + x), values[x : x + 4])
                if chunk == 0:
                    # ``join`` takes what stands beside a maximum of -inf for no keys; a row of NaN has keys.
                    known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                    memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, numbers: Numbers, tile: WorkTile, row: Int32, there: Boolean, chunk: Int32,
        sums: list[Float32], sink: Float32, row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Eight columns of a head's result, where it is ``there``."""
        head = tile.head + row
        factor = factor_beside(numbers, sink, row_max, row_sum)
        words = [op.pack(self.c.dtype, sums[x] * factor, sums[x + 1] * factor) for x in range(0, len(sums), 2)]
        self.output.store_chunk(tensors, tile, row, there, chunk, words)
        if there & (chunk == 0):
            self.output.store_stats(tensors, numbers, tile.token, head, row_max, row_sum)

    @cute.jit
    def _count(self, tensors: Tensors, numbers: Numbers, index: Int32, inbox: Inbox, shared: Int32, meeting: Meeting):
        """Leave in shared memory whether the other clusters' splits of this CTA's rows are all there."""
        count, info = tensors.count, meeting.info(shared)
        meet()  # orders the stores of all threads before the release of the addition
        if cute.arch.thread_idx()[0] % CONSUMER_THREADS == 0:
            at = index * MOST_CTAS + inbox.rank
            arrived = op.add_acq_rel(count.iterator.toint() + Int64(at) * 4, Int32(1))
            last = arrived == numbers.groups - 1
            if last:
                count[at] = Int32(0)
            info[1] = cutlass.select_(last, Int32(1), Int32(0))
        meet()

    @cute.jit
    def _splits(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, inbox: Inbox, first: Int64):
        """The sum over all clusters."""
        c = self.c
        columns, size = const_expr(CHUNK // c.itemsize), const_expr(c.split.nbytes)
        for index in cutlass.range(self._first(), self._end(inbox, tile), CONSUMER_THREADS, unroll=1):
            number, chunk, mine = self._place(inbox, tile, index)
            row = inbox.row(number)
            sums = [cute.make_rmem_tensor(4, Float32) for _ in range(columns // 4)]
            for rO in sums:
                rO.fill(0.0)
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for n in cutlass.range(0, numbers.groups, _AT_ONCE, unroll=1):
                # Beyond the last they repeat it.
                at = [first + Int64(cutlass.min(n + i, numbers.groups - 1)) * size for i in range(_AT_ONCE)]
                stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
                news = [
                    [op.load_4_floats(a + c.split.output_at(row, chunk * columns + 4 * x)) for a in at]
                    for x in range(columns // 4)
                ]
                there = [n + i < numbers.groups for i in range(_AT_ONCE)]
                maxima = [cutlass.select_(t, s[0], Float32(-_INF)) for t, s in zip(there, stats, strict=True)]
                old_max, old_sum = row_max, row_sum
                for rO, new in zip(sums, news, strict=True):
                    row_max, row_sum = join(rO, old_max, old_sum, maxima, [s[1] for s in stats], new)
            values = [rO[x] for rO in sums for x in range(4)]
            sink = sink_of(tensors, numbers, tile.head + row)
            self._store(tensors, numbers, tile, row, mine, chunk, values, sink, row_max, row_sum)
