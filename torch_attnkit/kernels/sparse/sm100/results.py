"""What the softmax's warpgroups do with O' when the last key is through.

    one CTA a work tile    tensor memory -> registers -> the result
    several                O', float32, over the ring -> the cluster's CTAs add up a share of the heads each over
                           distributed shared memory -> the result, or where clusters share a work tile a split in
                           device memory; the CTAs with the same share count themselves, and the last to come adds up
                           the splits, in their order

Imports cutlass.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops, word_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.partials import finite, join
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.warp_ops import exp2

from ..sm90.arguments import Numbers, Tensors
from ..sm90.output import Output, factor_of
from .config import LANES, MOST_CTAS, SOFTMAX_THREADS, SOFTMAX_WARPS, Config
from .memory import Memory
from .place import Place
from .softmax_warps import SoftmaxWarps, four, meet

_INF = float("inf")
# Of two words, the lower or the upper half of either, that of the lane with the lower column first.
_LOWER_HALVES, _UPPER_HALVES = 0x5410, 0x3276
_AT_ONCE = 4  # partial results of a row that a thread has on their way


def address_of(config: Config, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
    """Of a head's number in the result."""
    out = tensors.results.out
    offset = Int64(out.stride[0]) * token + Int64(out.stride[1]) * head + column
    return out.iterator.toint() + offset * config.itemsize


class Results:
    """The epilogue of the softmax's warpgroups; O' is in tensor memory, maxima and sums in shared."""

    def __init__(self, config: Config, softmax: SoftmaxWarps):
        self.c, self.softmax, self.output = config, softmax, Output(config.dtype)
        self.splits = MOST_CTAS // config.sides  # at most, of a cluster
        self.step = config.dim // 4  # vectors of four columns of a row

    @cute.jit
    def store(self, tensors: Tensors, numbers: Numbers, place: Place, m: Memory):
        """The result, by the one CTA that has it. A thread has a column of all heads; with its neighbour it exchanges
        one of every two heads for the neighbour's column of the other, so that it stores pairs."""
        c, own = self.c, self.softmax.own
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        meet()
        if thread < c.heads:
            head, factor = place.head + thread, Float32(0.0)
            if thread < place.heads:
                row_max, row_sum = m.sStat[thread * 2], m.sStat[thread * 2 + 1]
                factor = factor_of(tensors, numbers, head, row_max, row_sum)
                self.output.store_stats(tensors, numbers, place.token, head, row_max, row_sum)
            m.sFactor[thread] = factor
        meet()
        h0, odd = self.softmax.first_head(), lane & 1
        # The heads that this thread stores are every second, of those that there are.
        head, there = place.head + h0 + odd, place.heads - h0 - odd
        column = cute.arch.warp_idx() % 4 * LANES + lane - odd
        out = address_of(self.c, tensors, place.token, head, column)
        by_two = Int64(tensors.results.out.stride[1]) * (2 * c.itemsize)
        bytes_of = cutlass.select_(odd != 0, Int32(_UPPER_HALVES), Int32(_LOWER_HALVES))
        factors = [four(m.sFactor, h0 + h) for h in range(0, own, 4)]
        for p in cutlass.range(c.mma.parts, unroll=1):
            rO, target = self._columns(p, h0), out + p * (c.mma.part * c.itemsize)
            for h in cutlass.range_constexpr(0, own, 2):
                fours = factors[h // 4]
                pair = cute.arch.mul_packed_f32x2((rO[h], rO[h + 1]), (fours[h % 4], fours[h % 4 + 1]))
                word = op.pack(c.dtype, *pair)
                word = permute_bytes(word, cute.arch.shuffle_sync_bfly(word, 1), bytes_of)
                word_ops.store_word_if(target, word, there, h)
                target += by_two

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
            rO = self._columns(p, h0)
            for h in cutlass.range_constexpr(own):
                m.sO[(h0 + h) * c.dim + p * c.mma.part + column] = rO[h]

    def _columns(self, p: Int32, h0: Int32) -> list[Float32]:
        """This thread's column of part p, for the warpgroup's heads."""
        c = self.c
        at = tmem.lanes(c.mma.tensor_memory.output + p * c.heads + h0, cute.arch.warp_idx())
        got = tmem.load(at, self.softmax.own)
        tmem.await_loads()
        return got

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
            for vector in cutlass.range(lane, self.step, LANES, unroll=1):
                o_at = m.sO.iterator.toint() + (row * c.dim + vector * 4) * 4
                rO = cute.make_rmem_tensor(4, Float32)
                rO.fill(0.0)
                for first in cutlass.range_constexpr(0, self.splits, _AT_ONCE):
                    if place.splits > first:
                        for i in cutlass.range_constexpr(first, min(first + _AT_ONCE, self.splits)):
                            new = op.load_cluster_floats(4, op.cluster_address(o_at, peers[i]), there[i])
                            for x in cutlass.range_constexpr(4):
                                rO[x] = rO[x] + weights[i] * new[x]
                if numbers.groups == 1:
                    self._store(tensors, numbers, place, row, vector, rO, row_max, row_sum)
                else:
                    op.store_4_floats(split + c.split.output_at(row, vector * 4), [rO[x] for x in range(4)])
                    if vector == 0:
                        # ``join`` takes what stands beside a maximum of -inf for no keys; a row of NaN has keys.
                        known = cutlass.select_(row_sum == row_sum, row_max, row_sum)
                        memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

    @cute.jit
    def _store(
        self, tensors: Tensors, numbers: Numbers, place: Place, row: Int32, vector: Int32, rO: cute.Tensor,
        row_max: Float32, row_sum: Float32,
    ):  # fmt: skip
        """Four columns of a head's result."""
        head = place.head + row
        factor = factor_of(tensors, numbers, head, row_max, row_sum)
        low, high = (op.pack(self.c.dtype, rO[x] * factor, rO[x + 1] * factor) for x in (0, 2))
        op.store_2_pairs(address_of(self.c, tensors, place.token, head, vector * 4), low, high)
        if vector == 0:
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
        for index in cutlass.range(thread, place.rows * self.step, SOFTMAX_THREADS, unroll=1):
            row, vector = place.row + index // self.step, index % self.step
            rO = cute.make_rmem_tensor(4, Float32)
            rO.fill(0.0)
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for n in cutlass.range(0, numbers.groups, _AT_ONCE, unroll=1):
                # Beyond the last they repeat it.
                at = [first + Int64(cutlass.min(n + i, numbers.groups - 1)) * size for i in range(_AT_ONCE)]
                stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
                news = [op.load_4_floats(a + c.split.output_at(row, vector * 4)) for a in at]
                maxima = [cutlass.select_(n + i < numbers.groups, s[0], Float32(-_INF)) for i, s in enumerate(stats)]
                row_max, row_sum = join(rO, row_max, row_sum, maxima, [s[1] for s in stats], news)
            self._store(tensors, numbers, place, row, vector, rO, row_max, row_sum)
