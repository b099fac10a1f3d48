"""What becomes of a work tile when its last key is through: a store, or a merge of what the CTAs of a cluster have.

A CTA's partial result is normalised before it is rounded to the call's dtype, as its probabilities were: so a sum of
many keys does not leave the range of float16. Imports cutlass.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import LN_2, LOG2_E, exp2
from torch_attnkit.kernels.decode.config import CHUNK
from torch_attnkit.kernels.decode.sm90 import products

from .arguments import Numbers, Tensors
from .config import CONSUMERS, Config
from .mainloop import Fragments
from .meeting import NamedBarrier, by_head
from .plan import MOST_CTAS
from .schedule import WorkTile

_THREADS = 32 * CONSUMERS
_INF = float("inf")


def _meet() -> None:
    """All consumers."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=_THREADS)


@cute.jit
def _inverse(row_sum: Float32):
    """Of a denominator, and 0 of an empty row's."""
    return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(row_sum))


class Results:
    """The epilogue of a consumer warpgroup."""

    def __init__(self, config: Config, half: int):
        self.c, self.half = config, half

    @cute.jit
    def store(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, shared: Int32, w: Fragments):
        """This warpgroup's columns of the result."""
        c = self.c
        sums, lane = self._sums(shared, w), w.thread & 31
        for r in cutlass.range_constexpr(2):
            row = products.first_row(w.thread) + 8 * r
            head = tile.head + cutlass.min(row, tile.heads - 1)
            factor = self._factor(tensors, numbers, head, w.rMax[r], sums[r])
            there = row < tile.heads
            out = self._out(tensors, tile.token, head, self.half * c.ring.part + (lane & 3) * 8)
            for g in cutlass.range_constexpr(c.ring.part // 32):
                words = self._words(w, g, r, factor)
                if there:
                    copies.store_words(out + g * (32 * c.itemsize), words)
            if const_expr(self.half == 0):
                if there & ((lane & 3) == 0):
                    self._store_stats(tensors, numbers, tile.token, head, w.rMax[r], sums[r])

    @cute.jit
    def merge(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, shared: Int32, w: Fragments):
        """Leave this warpgroup's columns of a partial result to the cluster, and store a share of what comes of all."""
        c = self.c
        sums, lane, sStats = self._sums(shared, w), w.thread & 31, by_head(c.shared.stats, shared)
        for r in cutlass.range_constexpr(2):
            row = products.first_row(w.thread) + 8 * r
            factor = _inverse(sums[r])
            at = shared + row * c.pitch + (self.half * c.ring.part + (lane & 3) * 8) * c.itemsize
            for g in cutlass.range_constexpr(c.ring.part // 32):
                words = self._words(w, g, r, factor)
                if row < tile.heads:
                    copies.store_words(at + g * (32 * c.itemsize), words, cute.AddressSpace.smem)
            if const_expr(self.half == 0):
                if (lane & 3) == 0:
                    sStats[row, 0], sStats[row, 1] = w.rMax[r], sums[r]
        sync_cluster()
        self._combine(tensors, numbers, tile, shared)
        sync_cluster()  # no CTA may leave while another reads its memory

    @cute.jit
    def _sums(self, shared: Int32, w: Fragments):
        """The sums of both rows over both warpgroups' tiles. After this, no warpgroup reads query or ring any more."""
        sSums = by_head(self.c.shared.sums, shared)
        mine = [products.lanes_sum(w.rSum[r]) for r in range(2)]
        row, lane = products.first_row(w.thread), w.thread & 31
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sSums[row + 8 * r, self.half] = mine[r]
        _meet()
        # In the same order in both: what they divide by is the same to the bit.
        return [sSums[row + 8 * r, 0] + sSums[row + 8 * r, 1] for r in range(2)]

    @cute.jit
    def _words(self, w: Fragments, g: cutlass.Constexpr, r: cutlass.Constexpr, factor: Float32):
        """16 bytes of a row: of 32 columns, lane q of four has the q-th 8."""
        pairs = [16 * g + 4 * j + 2 * r for j in range(4)]
        words = [op.pack(self.c.dtype, w.rO[i] * factor, w.rO[i + 1] * factor) for i in pairs]
        return softmax.transpose_quads(words, w.thread & 3)

    @cute.jit
    def _factor(self, tensors: Tensors, numbers: Numbers, head: Int32, row_max: Float32, row_sum: Float32):
        """Of a numerator: 1 where it is the result, else what the sum, to which the sink belongs, divides by."""
        denominator = row_sum
        if numbers.has_sink != 0:
            denominator += exp2(tensors.sink[head] * LOG2_E - finite(row_max))
        inverse = cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))
        return cutlass.select_(numbers.normalize != 0, inverse, Float32(1.0))

    def _out(self, tensors: Tensors, token: Int32, head: Int32, column: Int32) -> Int64:
        offset = Int64(tensors.out.stride[0]) * token + Int64(tensors.out.stride[1]) * head + column
        return tensors.out.iterator.toint() + offset * self.c.itemsize

    @cute.jit
    def _store_stats(
        self, tensors: Tensors, numbers: Numbers, token: Int32, head: Int32, row_max: Float32, row_sum: Float32
    ):
        tensors.lse[token, head] = (row_max + op.log2(row_sum)) * LN_2
        if numbers.normalize == 0:
            tensors.row_sum[token, head] = row_sum

    @cute.jit
    def _combine(self, tensors: Tensors, numbers: Numbers, tile: WorkTile, shared: Int32):
        """This CTA's share of the rows: the sum over the cluster, eight columns a thread."""
        c = self.c
        rank, thread = cute.arch.block_in_cluster_idx()[0], cute.arch.thread_idx()[0] % _THREADS
        chunks = const_expr(c.dim * c.itemsize // CHUNK)
        columns = const_expr(CHUNK // c.itemsize)
        step = numbers.ctas * _THREADS
        for index in cutlass.range(rank * _THREADS + thread, tile.heads * chunks, step, unroll=1):
            row, chunk = index // chunks, index % chunks
            there = [cutlass.select_(i < numbers.ctas, Int32(1), Int32(0)) for i in range(MOST_CTAS)]
            peers = [there[i] * i for i in range(MOST_CTAS)]
            stat_at, part_at = c.shared.stats.at(shared) + row * 8, shared + row * c.pitch + chunk * CHUNK
            # All loads are on their way before the first is used.
            stats, parts = (
                [op.load_cluster_floats(n, op.cluster_address(at, peers[i]), there[i]) for i in range(MOST_CTAS)]
                for n, at in ((2, stat_at), (4, part_at))
            )
            maxima = [cutlass.select_(there[i] != 0, stats[i][0], Float32(-_INF)) for i in range(MOST_CTAS)]
            row_max, row_sum = Float32(-_INF), Float32(0.0)
            for i in cutlass.range_constexpr(MOST_CTAS):
                row_max = cute.arch.fmax(row_max, maxima[i])
            sums = [Float32(0.0)] * columns
            rPart = cute.make_rmem_tensor(4, Float32)
            rValues = cute.recast_tensor(rPart, c.dtype)
            for i in cutlass.range_constexpr(MOST_CTAS):
                weight = exp2(maxima[i] - finite(row_max)) * stats[i][1]
                row_sum += weight
                for x in cutlass.range_constexpr(4):
                    rPart[x] = parts[i][x]
                sums = [sums[x] + weight * rValues[x].to(Float32) for x in range(columns)]
            head = tile.head + row
            inverse = self._factor(tensors, numbers, head, row_max, row_sum)
            words = [op.pack(c.dtype, sums[x] * inverse, sums[x + 1] * inverse) for x in range(0, columns, 2)]
            copies.store_words(self._out(tensors, tile.token, head, chunk * columns), words)
            if chunk == 0:
                self._store_stats(tensors, numbers, tile.token, head, row_max, row_sum)


def sync_cluster() -> None:
    """All threads of a cluster meet; what they wrote to shared memory is there for the others."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
