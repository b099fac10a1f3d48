"""Tokens' results from those of their experts, weighted and added up in the order of choices, by the second product.

Behind the numbers of a row of h stand words of its token, which the first launch writes: which token it is, of how many
choices, and which of its rows counts the results that have come. Who brings the last of some features adds them up, so
the same bits come out whoever that is. Imports cutlass.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op

from ..sm90.arguments import Tensors
from ..sm90.routing import SortTogether
from ..sm90.schedule import WorkTile
from .config import MARK_WORDS, WEIGHT_ROWS

_EACH = 4  # features of a lane, of 128
_CHOICES_AT_ONCE = 4  # whose results are on their way


def _row_tiles(tensors: Tensors, rows: int) -> Int32:
    return (Int32(tensors.out.shape[1]) + rows - 1) // rows


def _mark(tensors: Tensors, rows: int, place: Int32) -> Int64:
    """Where the words of a row are; counters follow. ``rows``: features of a work tile of the second product."""
    nbytes = (MARK_WORDS + _row_tiles(tensors, rows) + 3) // 4 * 16
    return tensors.h.iterator.toint() + Int64(place + 1) * tensors.h.stride[0] * 2 - nbytes


class Marks:
    """In the first launch. ``rows``: features of a work tile of the second product."""

    def __init__(self, rows: int, sort: SortTogether):
        self.rows, self.sort = rows, sort

    @cute.jit
    def write(self, tensors: Tensors, sFirst: cute.Tensor):
        """All threads of all blocks, a token each."""
        threads = self.sort.threads
        first = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
        top_k = Int32(tensors.indices.shape[1])
        for token in cutlass.range(first, Int32(tensors.indices.shape[0]), cute.arch.grid_dim()[0] * threads, unroll=1):
            choices, home = Int32(0), Int32(-1)
            for k in cutlass.range(top_k, unroll=1):
                place = self.sort.place(tensors, sFirst, token * top_k + k)
                choices += cutlass.select_(place >= 0, Int32(1), Int32(0))
                home = cutlass.max(home, place)
            for k in cutlass.range(top_k, unroll=1):
                place = self.sort.place(tensors, sFirst, token * top_k + k)
                if place >= 0:
                    copies.store_words(_mark(tensors, self.rows, place), [token, choices, home, Int32(0)])
            if home >= 0:
                counters = _mark(tensors, self.rows, home) + 4 * MARK_WORDS
                for i in cutlass.range(0, _row_tiles(tensors, self.rows), 4, unroll=1):
                    copies.store_words(counters + Int64(4 * i), [Int32(0)] * 4)

    @cute.jit
    def clear(self, tensors: Tensors, token: Int32, column: Int32, count: cutlass.Constexpr):
        """``count`` results, of a token without experts."""
        at = tensors.out.iterator.toint() + (Int64(token) * tensors.out.stride[0] + column) * 2
        for i in cutlass.range_constexpr(0, count, 8):
            copies.store_words(at + 2 * i, [Int32(0)] * 4)


class Totals:
    """In the second product. ``rows``: features of a work tile."""

    def __init__(self, rows: int):
        self.rows, self.parts = rows, rows // WEIGHT_ROWS

    @cute.jit
    def run(self, tensors: Tensors, tile: WorkTile, warp: Int32):
        """A lane says that its token's features are in ``partial``, which it can see. Of those that are the last, the
        warp adds up one token after another."""
        mine, token, home, last = warp * 32 + cute.arch.lane_idx(), Int32(0), Int32(0), Int32(0)
        if mine < tile.columns:
            words = cute.make_rmem_tensor(MARK_WORDS, Int32)
            at = _mark(tensors, self.rows, tile.first + mine)
            copies.load(cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=16), words)
            token, home = words[0], words[2]
            counter = _mark(tensors, self.rows, home) + 4 * (MARK_WORDS + tile.row)
            last = cutlass.select_(op.add_acq_rel(counter, Int32(1)) == words[1] - 1, Int32(1), Int32(0))
        left = cute.arch.vote_ballot_sync(last != 0)
        cute.arch.sync_warp()  # what a lane has acquired, all may read
        while left != 0:
            lane = cute.arch.popc(~left & (left - 1))
            some, row = cute.arch.shuffle_sync(token, lane), cute.arch.shuffle_sync(home, lane)
            self._add_up(tensors, some, row, tile.row * self.rows)
            left = left & (left - 1)

    @cute.jit
    def _add_up(self, tensors: Tensors, token: Int32, home: Int32, first: Int32):
        """``home``: one of the token's rows, which is read in the place of those that are not there."""
        lane, top_k, size = cute.arch.lane_idx(), Int32(tensors.indices.shape[1]), Int32(tensors.out.shape[1])
        features = [first + part * WEIGHT_ROWS + lane * _EACH for part in range(self.parts)]
        inside = [cutlass.min(feature, size - _EACH) for feature in features]
        base, step = tensors.partial.iterator.toint(), tensors.partial.stride[0] * 4
        sums = cute.make_rmem_tensor(_EACH * self.parts, Float32)
        sums.fill(0.0)
        for some in cutlass.range(0, top_k, 32, unroll=1):
            place, weight = Int32(-1), Float32(0.0)
            if some + lane < top_k:
                place = tensors.order[token * top_k + some + lane]
                weight = tensors.weights[token, some + lane]
            for i in cutlass.range(0, cutlass.min(top_k - some, 32), _CHOICES_AT_ONCE, unroll=1):
                places = [cute.arch.shuffle_sync(place, i + j) for j in range(_CHOICES_AT_ONCE)]
                numbers = copies.fragments(_CHOICES_AT_ONCE * self.parts, _EACH, Float32)
                for j, row in enumerate(places):
                    at = base + Int64(cutlass.select_(row >= 0, row, home)) * step
                    for part, feature in enumerate(inside):
                        source = cute.make_ptr(Float32, at + feature * 4, cute.AddressSpace.gmem, assumed_align=16)
                        copies.load(source, numbers[j * self.parts + part])
                for j in cutlass.range_constexpr(_CHOICES_AT_ONCE):
                    if places[j] >= 0:
                        w = cute.arch.shuffle_sync(weight, i + j)
                        for n in cutlass.range_constexpr(0, _EACH * self.parts, 2):
                            y = numbers[j * self.parts + n // _EACH]
                            pair = y[n % _EACH], y[n % _EACH + 1]
                            sums[n], sums[n + 1] = cute.arch.fma_packed_f32x2(pair, (w, w), (sums[n], sums[n + 1]))
        for part in cutlass.range_constexpr(self.parts):
            if features[part] < size:
                s = [sums[_EACH * part + i] for i in range(_EACH)]
                at = tensors.out.iterator.toint() + (Int64(token) * tensors.out.stride[0] + features[part]) * 2
                op.store_2_pairs(at, *(op.pack(tensors.out.element_type, *s[j : j + 2]) for j in (0, 2)))


assert _EACH * 32 == WEIGHT_ROWS
