"""Top-k reduction in the second GEMM: sums a token's results, weighted, in the order of its choices.

Behind the elements of a row of h stand tag words of its token, written by the first launch: which token it is, of how
many choices, and which of its rows counts results. The CTA that writes the last of some features sums them, so the bits
do not depend on which CTA that is.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Flags, Scalars, Tensors, chosen
from ..work_tiles import SortByGrid, WorkTile
from .cluster import ceil_div
from .config import RESULT_WARPS, TAG_WORDS

_CHOICES_IN_FLIGHT = 4  # whose results are on their way


def _row_tiles(tensors: Tensors, rows: int) -> Int32:
    return ceil_div(Int32(tensors.out.shape[1]), rows)


def _mark(tensors: Tensors, rows: int, dest: Int32) -> Int64:
    """Address of a row's tag; counters follow. ``rows``: features of a tile of the second GEMM."""
    nbytes = ceil_div(TAG_WORDS + _row_tiles(tensors, rows), 4) * 16
    return tensors.h.iterator.toint() + Int64(dest + 1) * tensors.h.stride[0] * 2 - nbytes


class TokenTags:
    """In the first launch. ``rows``: features of a work tile of the second GEMM."""

    def __init__(self, rows: int, sort: SortByGrid):
        self.rows, self.sort = rows, sort

    @cute.jit
    def write(self, tensors: Tensors, sFirst: cute.Tensor):
        """All threads of all CTAs, a token each."""
        threads = self.sort.threads
        first = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
        top_k = Int32(tensors.indices.shape[1])
        for token in cutlass.range(first, Int32(tensors.indices.shape[0]), cute.arch.grid_dim()[0] * threads, unroll=1):
            choices, any_dest = Int32(0), Int32(-1)
            for k in cutlass.range(top_k, unroll=1):
                dest = self.sort.dest_row(tensors, sFirst, token * top_k + k)
                choices += cutlass.select_(dest >= 0, Int32(1), Int32(0))
                any_dest = cutlass.max(any_dest, dest)
            for k in cutlass.range(top_k, unroll=1):
                dest = self.sort.dest_row(tensors, sFirst, token * top_k + k)
                if dest >= 0:
                    copies.store_words(_mark(tensors, self.rows, dest), [token, choices, any_dest, Int32(0)])
            if any_dest >= 0:
                counters = _mark(tensors, self.rows, any_dest) + 4 * TAG_WORDS
                for i in cutlass.range(0, _row_tiles(tensors, self.rows), 4, unroll=1):
                    copies.store_words(counters + Int64(4 * i), [Int32(0)] * 4)

    @cute.jit
    def clear(self, tensors: Tensors, token: Int32, column: Int32, count: cutlass.Constexpr):
        """``count`` results, of a token without experts."""
        at = tensors.out.iterator.toint() + (Int64(token) * tensors.out.stride[0] + column) * 2
        for i in cutlass.range_constexpr(0, count, 8):
            copies.store_words(at + 2 * i, [Int32(0)] * 4)


class TopkReduce:
    """In the second GEMM. ``rows``: features of a tile; ``completed``: whether results have their expert's factor, even
    without biases; ``any_warp``: whether warps have synchronised and see all results, or each those of 32 tokens."""

    def __init__(self, rows: int, completed: bool, any_warp: bool):
        self.rows, self.each = rows, rows // 32  # neighbouring features of a lane
        self.completed, self.any_warp = completed, any_warp

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32):
        """A lane counts the features of its token, which it has in ``partial``; if they are the last, the warp sums
        that token."""
        token, any_dest, last, lane = Int32(0), Int32(0), Int32(0), cute.arch.lane_idx()
        column = lane * RESULT_WARPS + warp if const_expr(self.any_warp) else warp * 32 + lane
        top_k, count = Int32(tensors.indices.shape[1]), Int32(tensors.indices.shape[1])
        if column < tile.columns:
            words = cute.make_rmem_tensor(TAG_WORDS, Int32)
            at = _mark(tensors, self.rows, tile.first + column)
            copies.load(cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=16), words)
            token, count, any_dest = words[0], words[1], words[2]
            counter = _mark(tensors, self.rows, any_dest) + 4 * (TAG_WORDS + tile.row)
            last = cutlass.select_(op.add_acq_rel(counter, Int32(1)) == count - 1, Int32(1), Int32(0))
        left, whole = cute.arch.vote_ballot_sync(last != 0), cute.arch.vote_all_sync(count == top_k)
        cute.arch.sync_warp()  # what a lane has acquired, all may read
        while left != 0:
            which = cute.arch.popc(~left & (left - 1))
            some, row = cute.arch.shuffle_sync(token, which), cute.arch.shuffle_sync(any_dest, which)
            self._add_up(tensors, scalars, some, row, tile.row * self.rows, whole)
            left = left & (left - 1)

    @cute.jit
    def _add_up(
        self, tensors: Tensors, scalars: Scalars, token: Int32, any_dest: Int32, first: Int32, whole: cutlass.Boolean
    ):  # fmt: skip
        """``any_dest``: one of the token's rows, which is read in place of absent ones; ``whole``: all
        are."""
        lane, top_k, size = cute.arch.lane_idx(), Int32(tensors.indices.shape[1]), Int32(tensors.out.shape[1])
        feature = first + lane * self.each
        inside = cutlass.min(feature, size - self.each)
        sums = cute.make_rmem_tensor(self.each, Float32)
        sums.fill(0.0)
        for some in cutlass.range(0, top_k, 32, unroll=1):
            dest, weight = Int32(-1), Float32(0.0)
            if some + lane < top_k:
                dest = tensors.order[token * top_k + some + lane]
                weight = tensors.weights[token, some + lane]
                if const_expr(not self.completed):
                    weight *= self._factor(tensors, scalars.down, token, some + lane)
            count = cutlass.min(top_k - some, 32)
            for i in cutlass.range(0, count, _CHOICES_IN_FLIGHT, unroll=1):
                if whole & (i + _CHOICES_IN_FLIGHT <= count):
                    self._add(tensors, inside, sums, dest, weight, any_dest, i, True)
                else:
                    self._add(tensors, inside, sums, dest, weight, any_dest, i, False)
        if feature < size:
            at = tensors.out.iterator.toint() + (Int64(token) * tensors.out.stride[0] + feature) * 2
            kind = tensors.out.element_type
            copies.store_words(at, [op.pack(kind, sums[i], sums[i + 1]) for i in range(0, self.each, 2)])

    @cute.jit
    def _factor(self, tensors: Tensors, flags: Flags, token: Int32, k: Int32) -> Float32:
        """Of the results of a choice."""
        divisor = Float32(1.0)
        if flags.bias == 0:
            if flags.divisor != 0:
                divisor = tensors.down.divisor[cutlass.max(chosen(tensors, token, k), Int32(0))]
            if flags.activation != 0:
                divisor *= tensors.down.activation[0]
        return Float32(1.0) / divisor

    @cute.jit
    def _add(
        self, tensors: Tensors, feature: Int32, sums: cute.Tensor, dest: Int32, weight: Float32, any_dest: Int32,
        i: Int32, whole: cutlass.Constexpr,
    ):  # fmt: skip
        """Some choices from the i-th on, whose rows and weights lanes have."""
        base, step = tensors.partial.iterator.toint() + feature * 4, Int32(tensors.out.shape[1]) * 4
        dests = [cute.arch.shuffle_sync(dest, i + j) for j in range(_CHOICES_IN_FLIGHT)]
        rows = copies.fragments(_CHOICES_IN_FLIGHT, self.each, Float32)
        for j, row in enumerate(dests):
            at = base + Int64(row if whole else cutlass.select_(row >= 0, row, any_dest)) * step
            source = cute.make_ptr(Float32, at, cute.AddressSpace.gmem, assumed_align=4 * self.each)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(self.each)), rows[j])
        for j in cutlass.range_constexpr(_CHOICES_IN_FLIGHT):
            if const_expr(whole):
                self._accumulate(sums, rows[j], cute.arch.shuffle_sync(weight, i + j))
            elif dests[j] >= 0:
                self._accumulate(sums, rows[j], cute.arch.shuffle_sync(weight, i + j))

    def _accumulate(self, sums: cute.Tensor, y: cute.Tensor, weight: Float32) -> None:
        for n in range(0, self.each, 2):
            pair = cute.arch.fma_packed_f32x2((y[n], y[n + 1]), (weight, weight), (sums[n], sums[n + 1]))
            sums[n], sums[n + 1] = pair
