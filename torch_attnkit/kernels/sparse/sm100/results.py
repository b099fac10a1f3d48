"""What the softmax's warpgroups do with O' when the last key is through.

one CTA a work tile    tensor memory -> registers -> the result (number_output.py, fp4_output.py)
several                O', float32, over the ring -> the cluster's CTAs add up a share of the heads each over
                       distributed shared memory -> the result, or where clusters share a work tile a split in
                       device memory; the CTAs with the same share count themselves, and the last to come adds up
                       the splits, in their order
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.warp_ops import exp2

from ..sm90.arguments import Numbers, Tensors
from ..sm90.output import factor_of
from .columns import columns_of
from .config import LANES, MOST_CTAS, SOFTMAX_THREADS, SOFTMAX_WARPS, Config
from .fp4_output import Fp4Output
from .memory import Memory
from .number_output import NumberOutput
from .place import Place
from .softmax_warps import SoftmaxWarps, meet

_INF = float("inf")
_AT_ONCE = 4  # partial results of a row that a thread has on their way


class Results:
    """The epilogue of the softmax's warpgroups; O' is in tensor memory, maxima and sums in shared."""

    def __init__(self, config: Config, softmax: SoftmaxWarps):
        self.c, self.softmax = config, softmax
        self.output = NumberOutput(config) if config.fp4 is None else Fp4Output(config)
        self.splits = MOST_CTAS // config.sides  # at most, of a cluster
        # Of what is merged a thread has a run of columns at a time, and warps go through runs whole.
        self.runs = config.dim // self.output.run  # of a row
        self.whole = self.runs % LANES == 0

    @cute.jit
    def store(self, tensors: Tensors, numbers: Numbers, place: Place, m: Memory):
        """The result, by the one CTA that has it."""
        c, thread = self.c, cute.arch.thread_idx()[0]
        meet()
        if thread < c.heads:
            head, factor = place.head + thread, Float32(0.0)
            if thread < place.heads:
                row_max, row_sum = m.sStat[thread * 2], m.sStat[thread * 2 + 1]
                factor = factor_of(tensors, numbers, head, row_max, row_sum)
                self.output.store_stats(tensors, numbers, place.token, head, row_max, row_sum)
            m.sFactor[thread] = factor
        meet()
        self.output.store(tensors, place, m, self.softmax.first_head())

    @cute.jit
    def leave(self, m: Memory, tiles: Int32):
        """O' in shared memory, for the cluster."""
        c, own = self.c, self.softmax.own
        if const_expr(c.sides > 1):
            # The other side has read all that this one sent: places are free on both.
            for s in cutlass.range_constexpr(c.mma.stages):
                m.ring.await_empty(tiles * c.mma.parts + s)
        h0 = self.softmax.first_head()
        column = cute.arch.warp_idx() % 4 * LANES + cute.arch.lane_idx()
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO = columns_of(c, p, h0)
            for h in cutlass.range_constexpr(own):
                m.sO[(h0 + h) * c.dim + p * c.mma.part + column] = rO[h]

    @cute.jit
    def merge(self, tensors: Tensors, numbers: Numbers, place: Place, m: Memory):
        """What the CTAs of the cluster have left of this CTA's rows, once they all have."""
        c = self.c
        if numbers.groups == 1:
            self._cluster(tensors, numbers, place, m, Int64(0))
        else:
            size = const_expr(c.split.nbytes)
            side = (place.work * c.sides + place.side) * numbers.groups
            first = tensors.splits.iterator.toint() + Int64(side) * size
            self._cluster(tensors, numbers, place, m, first + Int64(place.group) * size)
            if self._is_last(tensors, numbers, place, m):
                self._clusters(tensors, numbers, place, first)

    @cute.jit
    def _cluster(self, tensors: Tensors, numbers: Numbers, place: Place, m: Memory, split: Int64):
        """A warp has a row at a time; to ``split`` where there are more clusters."""
        c = self.c
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for r in cutlass.range(warp, place.rows, SOFTMAX_WARPS, unroll=1):
            row = place.row + r
            there = [cutlass.select_(i < place.splits, Int32(1), Int32(0)) for i in range(self.splits)]
            peers = [there[i] * i * c.sides + place.side for i in range(self.splits)]
            stat_at = m.sStat.iterator.toint() + row * 8
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peers[i]), there[i]) for i in range(self.splits)
            ]
            maxima = [cutlass.select_(there[i] != 0, stats[i][0], Float32(-_INF)) for i in range(self.splits)]
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for i in cutlass.range_constexpr(self.splits):
                row_max = cute.arch.fmax(row_max, maxima[i])
            weights = [exp2(x - finite(row_max)) for x in maxima]
            for i in cutlass.range_constexpr(self.splits):
                row_sum += weights[i] * stats[i][1]
            for index in cutlass.range(lane, const_expr(-(-self.runs // LANES) * LANES), LANES, unroll=1):
                run, mine = (index, Boolean(True)) if self.whole else (index % self.runs, index < self.runs)
                vectors = self.output.vectors(run)
                o_at = [m.sO.iterator.toint() + (row * c.dim + v * 4) * 4 for v in vectors]
                rO = cute.make_rmem_tensor(4 * len(vectors), Float32)
                rO.fill(0.0)
                for first in cutlass.range_constexpr(0, self.splits, _AT_ONCE):
                    if place.splits > first:
                        for i in cutlass.range_constexpr(first, min(first + _AT_ONCE, self.splits)):
                            for v in cutlass.range_constexpr(len(vectors)):
                                new = op.load_cluster_floats(4, op.cluster_address(o_at[v], peers[i]), there[i])
                                for x in cutlass.range_constexpr(4 * v, 4 * v + 4):
                                    rO[x] = rO[x] + weights[i] * new[x - 4 * v]
                columns = [rO[x] for x in range(4 * len(vectors))]
                if numbers.groups == 1:
                    self._store(tensors, numbers, place, row, mine, run, columns, row_max, row_sum)
                elif mine:
                    for v in cutlass.range_constexpr(len(vectors)):
                        at = split + c.split.output_at(row, vectors[v] * 4)
                        op.store_4_floats(at, columns[4 * v : 4 * v + 4])
                    if run == 0:
                        # ``join`` takes what stands beside a maximum of -inf for no keys; a row of NaN has keys.
                        known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                        memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, numbers: Numbers, place: Place, row: Int32, there: Boolean, run: Int32,
        columns: list[Float32], row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """What a thread has of a head's result, where that is ``there``."""
        head = place.head + row
        factor = factor_of(tensors, numbers, head, row_max, row_sum)
        words = [op.pack(self.c.dtype, *(y * factor for y in columns[x : x + 2])) for x in range(0, len(columns), 2)]
        self.output.store_run(tensors, place.token, head, there, run, words)
        if there & (run == 0):
            self.output.store_stats(tensors, numbers, place.token, head, row_max, row_sum)

    @cute.jit
    def _is_last(self, tensors: Tensors, numbers: Numbers, place: Place, m: Memory):
        """Whether the other clusters' splits of this CTA's rows are all there."""
        count = tensors.count
        flag = cute.make_tensor(
            cute.make_ptr(Int32, m.flag_at, cute.AddressSpace.smem, assumed_align=4), cute.make_layout(1)
        )
        meet()  # orders the stores of all threads before the release of the addition
        if cute.arch.thread_idx()[0] == 0:
            at = place.work * MOST_CTAS + cute.arch.block_in_cluster_idx()[0]
            arrived = op.add_acq_rel(count.iterator.toint() + Int64(at) * 4, Int32(1))
            last = arrived == numbers.groups - 1
            if last:
                count[at] = Int32(0)
            flag[0] = cutlass.select_(last, Int32(1), Int32(0))
        meet()
        return flag[0] != 0

    @cute.jit
    def _clusters(self, tensors: Tensors, numbers: Numbers, place: Place, first: Int64):
        """The sum over all clusters."""
        c = self.c
        size = const_expr(c.split.nbytes)
        thread = cute.arch.thread_idx()[0]
        for index in cutlass.range(thread, self._end(place), SOFTMAX_THREADS, unroll=1):
            row, run, mine = self._row_and_run(place, index)
            vectors = self.output.vectors(run)
            sums = [cute.make_rmem_tensor(4, Float32) for _ in vectors]
            for rO in sums:
                rO.fill(0.0)
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for n in cutlass.range(0, numbers.groups, _AT_ONCE, unroll=1):
                # Beyond the last they repeat it.
                at = [first + Int64(cutlass.min(n + i, numbers.groups - 1)) * size for i in range(_AT_ONCE)]
                stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
                news = [[op.load_4_floats(a + c.split.output_at(row, v * 4)) for a in at] for v in vectors]
                maxima = [cutlass.select_(n + i < numbers.groups, s[0], Float32(-_INF)) for i, s in enumerate(stats)]
                old_max, old_sum = row_max, row_sum
                for rO, new in zip(sums, news, strict=True):
                    row_max, row_sum = join(rO, old_max, old_sum, maxima, [s[1] for s in stats], new)
            columns = [rO[x] for rO in sums for x in range(4)]
            self._store(tensors, numbers, place, row, mine, run, columns, row_max, row_sum)

    def _end(self, place: Place) -> Int32:
        """Of the runs of this CTA's rows, in whole warps: some results are of several lanes."""
        runs = place.rows * self.runs
        return runs if self.whole else (runs + (LANES - 1)) // LANES * LANES

    def _row_and_run(self, place: Place, index: Int32) -> tuple[Int32, Int32, Boolean]:
        """Where run ``index`` of this CTA's rows is, and whether there is such a row; else it is the last."""
        row, run = index // self.runs, index % self.runs
        if self.whole:
            return place.row + row, run, Boolean(True)
        return place.row + cutlass.min(row, place.rows - 1), run, row < place.rows
