"""How the CTAs that share a work tile's keys join what they have. Imports cutlass.

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
from torch_attnkit.cuda.warp_ops import exp2
from torch_attnkit.kernels.decode.config import CHUNK

from .arguments import Numbers, Tensors
from .config import CONSUMER_THREADS, Config
from .fp4_output import Fp4Output
from .inbox import Inbox
from .meeting import Meeting, meet
from .output import Output, factor_of
from .places import LANES
from .plan import MOST_CTAS
from .schedule import WorkTile

_INF = float("inf")
_AT_ONCE = 4  # splits on their way


class Merge:
    """For all consumers of a CTA; ``part`` says which CTA of the work tile it is."""

    def __init__(self, config: Config, output: Output | Fp4Output):
        self.c, self.output = config, output
        self.chunks = config.dim * config.itemsize // CHUNK  # of a row
        self.most = MOST_CTAS // config.sides

    @cute.jit
    def run(
        self, tensors: Tensors, numbers: Numbers, tile: WorkTile, index: Int32, part: Int32, inbox: Inbox,
        shared: Int32, meeting: Meeting,
    ):  # fmt: skip
        """Work tile number ``index``, of which every consumer has sent its columns."""
        first = tensors.splits.iterator.toint() + Int64(index * numbers.groups) * self.c.split.nbytes
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(meeting.come, inbox.expected(tile))
        meet()  # the own rows are there
        cute.arch.mbarrier_wait(meeting.come, 0)
        self._cluster(tensors, numbers, tile, inbox, first + Int64(part // numbers.ctas) * self.c.split.nbytes)
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
    def _cluster(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, inbox: Inbox, split: Int64):
        """This CTA's share of the rows: the sum over the cluster, eight columns a thread; to ``split`` where there are
        more clusters."""
        c = self.c
        columns = const_expr(CHUNK // c.itemsize)
        for index in cutlass.range(self._first(), self._end(inbox, tile), CONSUMER_THREADS, unroll=1):
            number, chunk, mine = self._place(inbox, tile, index)
            row = inbox.row(number)
            there = [cutlass.select_(i < numbers.ctas, Int32(1), Int32(0)) for i in range(self.most)]
            found = [inbox.found(there[i] * i, number) for i in range(self.most)]
            # All loads are on their way before the first is used.
            stats, parts = (
                [op.load_shared_floats(n, found[i] + at, there[i]) for i in range(self.most)]
                for n, at in ((2, c.dim * c.itemsize), (4, chunk * CHUNK))
            )
            maxima = [cutlass.select_(there[i] != 0, stats[i][0], Float32(-_INF)) for i in range(self.most)]
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for i in cutlass.range_constexpr(self.most):
                row_max = cute.arch.fmax(row_max, maxima[i])
            sums = [Float32(0.0)] * columns
            rPart = cute.make_rmem_tensor(4, Float32)
            rValues = cute.recast_tensor(rPart, c.dtype)
            for i in cutlass.range_constexpr(self.most):
                weight = exp2(maxima[i] - finite(row_max)) * stats[i][1]
                row_sum += weight
                for x in cutlass.range_constexpr(4):
                    rPart[x] = parts[i][x]
                sums = [sums[x] + weight * rValues[x].to(Float32) for x in range(columns)]
            if numbers.groups == 1:
                self._store(tensors, numbers, tile, row, mine, chunk, sums, row_max, row_sum)
            elif mine:
                for x in cutlass.range_constexpr(0, columns, 4):
                    op.store_4_floats(split + c.split.output_at(row, chunk * columns + x), sums[x : x + 4])
                if chunk == 0:
                    # ``join`` takes what stands beside a maximum of -inf for no keys; a row of NaN has keys.
                    known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                    memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, numbers: Numbers, tile: WorkTile, row: Int32, there: Boolean, chunk: Int32,
        sums: list[Float32], row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Eight columns of a head's result, where it is ``there``."""
        head = tile.head + row
        factor = factor_of(tensors, numbers, head, row_max, row_sum)
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
            self._store(tensors, numbers, tile, row, mine, chunk, values, row_max, row_sum)
