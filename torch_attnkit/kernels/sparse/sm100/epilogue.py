"""Epilogue: O' from tensor memory to the result, or split-KV reduction over DSMEM and a workspace.

    one CTA a work tile    tensor memory -> registers -> result
    several                O' in float32 over the ring -> the cluster's CTAs reduce a share of the heads each over DSMEM
                           -> result, or where clusters share a work tile a split in the workspace; the last CTA to
                           arrive reduces the splits, in order

A thread has one column of all heads of its warpgroup. Neighbouring threads exchange every second head, so that each has
pairs of columns, as words of the call's dtype.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops, word_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars, Tensors
from ..epilogue import DenseStore, factor_of
from .config import LANES, MOST_CTAS, SOFTMAX_THREADS, SOFTMAX_WARPS, Config
from .cta import CtaCoord, Memory
from .softmax_warps import SoftmaxWarps, four, sync_softmax

_INF = float("inf")
_IN_FLIGHT = 4  # partials of a row in flight per thread
# PRMT selectors: the lower or upper halves of two words, lower column first.
_LOWER_HALVES, _UPPER_HALVES = 0x5410, 0x3276


def columns_of(config: Config, p: Int32, h0: Int32) -> list[Float32]:
    """This thread's column of part p of O', for the warpgroup's heads."""
    at = tmem.lanes(config.mma.tensor_memory.output + p * config.heads + h0, cute.arch.warp_idx())
    got = tmem.load(at, config.mma.own)
    tmem.await_loads()
    return got


def halves_of(lane: Int32) -> Int32:
    """PRMT selector of the halves that a lane keeps of its word and its neighbour's."""
    return cutlass.select_(lane & 1 != 0, Int32(_UPPER_HALVES), Int32(_LOWER_HALVES))


def factors_of(config: Config, m: Memory, h0: Int32) -> list[cute.Tensor]:
    """Factors of the warpgroup's heads, by fours."""
    return [four(m.sFactor, h0 + h) for h in range(0, config.mma.own, 4)]


def pair_of(config: Config, rO: list[Float32], factors: list[cute.Tensor], h: int, halves: Int32) -> Int32:
    """Two columns, this thread's and its neighbour's, of head ``h`` in even lanes and ``h + 1`` in odd ones, scaled and
    rounded."""
    fours = factors[h // 4]
    pair = cute.arch.mul_packed_f32x2((rO[h], rO[h + 1]), (fours[h % 4], fours[h % 4 + 1]))
    word = op.pack(config.dtype, *pair)
    return permute_bytes(word, cute.arch.shuffle_sync_bfly(word, 1), halves)


class DenseOutput(DenseStore):
    """Stores 16-bit results; ``run``: columns of a thread in ``store_run``."""

    run = 4

    def __init__(self, config: Config):
        super().__init__(config.dtype)
        self.c = config

    @cute.jit
    def store(self, tensors: Tensors, cta: CtaCoord, m: Memory, h0: Int32):
        """From tensor memory: a warpgroup's heads from ``h0`` on, in pairs of columns."""
        c, own = self.c, self.c.mma.own
        lane = cute.arch.lane_idx()
        odd = lane & 1
        # This thread stores every second head.
        head, valid = cta.head + h0 + odd, cta.heads - h0 - odd
        column = cute.arch.warp_idx() % 4 * LANES + lane - odd
        out = self.address(tensors, cta.token, head, column)
        by_two = Int64(tensors.results.out.stride[1]) * (2 * c.itemsize)
        halves, factors = halves_of(lane), factors_of(c, m, h0)
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO, target = columns_of(c, p, h0), out + p * (c.mma.part * c.itemsize)
            for h in cutlass.range_constexpr(0, own, 2):
                word_ops.store_word_if(target, pair_of(c, rO, factors, h, halves), valid, h)
                target += by_two

    def vectors(self, run: Int32) -> list[Int32]:
        """Groups of four columns that a thread reduces for run ``run``."""
        return [run]

    @cute.jit
    def store_run(self, tensors: Tensors, token: Int32, head: Int32, valid: Boolean, run: Int32, words: list[Int32]):
        op.store_2_pairs(self.address(tensors, token, head, run * self.run), words[0], words[1])


class Epilogue:
    """O' is in tensor memory, maxima and sums in shared memory; ``output`` stores."""

    def __init__(self, config: Config, softmax: SoftmaxWarps, output: Any):
        self.c, self.softmax, self.output = config, softmax, output
        self.splits = MOST_CTAS // config.sides  # at most, of a cluster
        # A thread reduces a run of columns at a time; warps stay whole.
        self.runs = config.dim // self.output.run  # of a row
        self.boxes = self.runs % LANES == 0

    @cute.jit
    def store(self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, m: Memory):
        """The CTA has all keys of the work tile."""
        c, thread = self.c, cute.arch.thread_idx()[0]
        sync_softmax()
        if thread < c.heads:
            head, factor = cta.head + thread, Float32(0.0)
            if thread < cta.heads:
                row_max, row_sum = m.sStat[thread * 2], m.sStat[thread * 2 + 1]
                factor = factor_of(tensors, scalars, head, row_max, row_sum)
                self.output.store_stats(tensors, scalars, cta.token, head, row_max, row_sum)
            m.sFactor[thread] = factor
        sync_softmax()
        self.output.store(tensors, cta, m, self.softmax.first_head())

    @cute.jit
    def leave(self, m: Memory, tiles: Int32):
        """O' in shared memory, for the cluster."""
        c, own = self.c, self.softmax.own
        if const_expr(c.sides > 1):
            # The other side's MMAs have read all slots, which O' overwrites.
            for s in cutlass.range_constexpr(c.mma.stages):
                m.ring.await_empty(tiles * c.mma.parts + s)
        h0 = self.softmax.first_head()
        column = cute.arch.warp_idx() % 4 * LANES + cute.arch.lane_idx()
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO = columns_of(c, p, h0)
            for h in cutlass.range_constexpr(own):
                m.sO[(h0 + h) * c.dim + p * c.mma.part + column] = rO[h]

    @cute.jit
    def merge(self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, m: Memory):
        """What the CTAs of the cluster have left of this CTA's rows, once they all have."""
        c = self.c
        if scalars.groups == 1:
            self._cluster(tensors, scalars, cta, m, Int64(0))
        else:
            size = const_expr(c.split.nbytes)
            side = (cta.work * c.sides + cta.side) * scalars.groups
            first = tensors.splits.iterator.toint() + Int64(side) * size
            self._cluster(tensors, scalars, cta, m, first + Int64(cta.group) * size)
            if self._is_last(tensors, scalars, cta, m):
                self._clusters(tensors, scalars, cta, first)

    @cute.jit
    def _cluster(self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, m: Memory, split: Int64):
        """Reduce over the cluster, a row per warp; to ``split`` if there are more clusters."""
        c = self.c
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for r in cutlass.range(warp, cta.rows, SOFTMAX_WARPS, unroll=1):
            row = cta.row + r
            valid = [cutlass.select_(i < cta.splits, Int32(1), Int32(0)) for i in range(self.splits)]
            peers = [valid[i] * i * c.sides + cta.side for i in range(self.splits)]
            stat_at = m.sStat.iterator.toint() + row * 8
            stats = [
                op.load_cluster_floats(2, op.cluster_address(stat_at, peers[i]), valid[i]) for i in range(self.splits)
            ]
            maxima = [cutlass.select_(valid[i] != 0, stats[i][0], Float32(-_INF)) for i in range(self.splits)]
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for i in cutlass.range_constexpr(self.splits):
                row_max = cute.arch.fmax(row_max, maxima[i])
            weights = [exp2(x - finite(row_max)) for x in maxima]
            for i in cutlass.range_constexpr(self.splits):
                row_sum += weights[i] * stats[i][1]
            for index in cutlass.range(lane, const_expr(-(-self.runs // LANES) * LANES), LANES, unroll=1):
                run, valid_run = (index, Boolean(True)) if self.boxes else (index % self.runs, index < self.runs)
                vectors = self.output.vectors(run)
                o_at = [m.sO.iterator.toint() + (row * c.dim + v * 4) * 4 for v in vectors]
                rO = cute.make_rmem_tensor(4 * len(vectors), Float32)
                rO.fill(0.0)
                for first in cutlass.range_constexpr(0, self.splits, _IN_FLIGHT):
                    if cta.splits > first:
                        for i in cutlass.range_constexpr(first, min(first + _IN_FLIGHT, self.splits)):
                            for v in cutlass.range_constexpr(len(vectors)):
                                new = op.load_cluster_floats(4, op.cluster_address(o_at[v], peers[i]), valid[i])
                                for x in cutlass.range_constexpr(4 * v, 4 * v + 4):
                                    rO[x] = rO[x] + weights[i] * new[x - 4 * v]
                columns = [rO[x] for x in range(4 * len(vectors))]
                if scalars.groups == 1:
                    self._store(tensors, scalars, cta, row, valid_run, run, columns, row_max, row_sum)
                elif valid_run:
                    for v in cutlass.range_constexpr(len(vectors)):
                        at = split + c.split.output_at(row, vectors[v] * 4)
                        op.store_4_floats(at, columns[4 * v : 4 * v + 4])
                    if run == 0:
                        # ``join`` skips splits whose maximum is -inf; a row of NaN must not be skipped.
                        known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                        memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, row: Int32, valid: Boolean, run: Int32,
        columns: list[Float32], row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Store a thread's run of a head's result, if ``valid``."""
        head = cta.head + row
        factor = factor_of(tensors, scalars, head, row_max, row_sum)
        words = [op.pack(self.c.dtype, *(y * factor for y in columns[x : x + 2])) for x in range(0, len(columns), 2)]
        self.output.store_run(tensors, cta.token, head, valid, run, words)
        if valid & (run == 0):
            self.output.store_stats(tensors, scalars, cta.token, head, row_max, row_sum)

    @cute.jit
    def _is_last(self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, m: Memory):
        """Whether this CTA is the last of the clusters to arrive."""
        count = tensors.count
        flag = cute.make_tensor(
            cute.make_ptr(Int32, m.flag_at, cute.AddressSpace.smem, assumed_align=4), cute.make_layout(1)
        )
        sync_softmax()  # all threads' stores before the release by the atomic
        if cute.arch.thread_idx()[0] == 0:
            at = cta.work * MOST_CTAS + cute.arch.block_in_cluster_idx()[0]
            arrived = op.add_acq_rel(count.iterator.toint() + Int64(at) * 4, Int32(1))
            last = arrived == scalars.groups - 1
            if last:
                count[at] = Int32(0)
            flag[0] = cutlass.select_(last, Int32(1), Int32(0))
        sync_softmax()
        return flag[0] != 0

    @cute.jit
    def _clusters(self, tensors: Tensors, scalars: Scalars, cta: CtaCoord, first: Int64):
        """Reduce the splits of all clusters."""
        c = self.c
        size = const_expr(c.split.nbytes)
        thread = cute.arch.thread_idx()[0]
        for index in cutlass.range(thread, self._end(cta), SOFTMAX_THREADS, unroll=1):
            row, run, valid_run = self._row_and_run(cta, index)
            vectors = self.output.vectors(run)
            sums = [cute.make_rmem_tensor(4, Float32) for _ in vectors]
            for rO in sums:
                rO.fill(0.0)
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for n in cutlass.range(0, scalars.groups, _IN_FLIGHT, unroll=1):
                # Past the end the last split again, with weight 0.
                at = [first + Int64(cutlass.min(n + i, scalars.groups - 1)) * size for i in range(_IN_FLIGHT)]
                stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
                news = [[op.load_4_floats(a + c.split.output_at(row, v * 4)) for a in at] for v in vectors]
                maxima = [cutlass.select_(n + i < scalars.groups, s[0], Float32(-_INF)) for i, s in enumerate(stats)]
                old_max, old_sum = row_max, row_sum
                for rO, new in zip(sums, news, strict=True):
                    row_max, row_sum = join(rO, old_max, old_sum, maxima, [s[1] for s in stats], new)
            columns = [rO[x] for rO in sums for x in range(4)]
            self._store(tensors, scalars, cta, row, valid_run, run, columns, row_max, row_sum)

    def _end(self, cta: CtaCoord) -> Int32:
        """Runs of this CTA's rows, rounded up to whole warps, since FP4 stores are warp-wide."""
        runs = cta.rows * self.runs
        return runs if self.boxes else (runs + (LANES - 1)) // LANES * LANES

    def _row_and_run(self, cta: CtaCoord, index: Int32) -> tuple[Int32, Int32, Boolean]:
        """(row, run, whether there is such a row) of run ``index``; past the end the last row."""
        row, run = index // self.runs, index % self.runs
        if self.boxes:
            return cta.row + row, run, Boolean(True)
        return cta.row + cutlass.min(row, cta.rows - 1), run, row < cta.rows
