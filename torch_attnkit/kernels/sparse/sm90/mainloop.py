"""A consumer warpgroup: the scores of every second tile, and half of the columns of the output of all.

    warpgroup 0   S0 softmax0 P0 O+=P0 |       S2, O+=P1, S2 softmax2 P2 O+=P2 | ...
    warpgroup 1         S1 S1 O+=P0 softmax1 P1 O+=P1 |       S3, O+=P2, S3 ...

64 heads of 512 columns are too much for the registers of one warpgroup. A warpgroup has the probabilities of its own
tiles in registers and leaves them in shared memory for the other, with the maxima and the factors of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.sm90 import wgmma as products
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.warp_ops import exp2

from .arguments import Numbers
from .config import HALVES, Config
from .masks import to_scores
from .meeting import Meeting, by_head

_INF = float("inf")
_P_KEYS = 64  # columns of a buffer of probabilities, of which as many are used as a tile has keys


@dataclass
class Fragments(Fixed):
    """A warpgroup's slices of the operands, its accumulator and its statistics."""

    thread: Int32  # of the warpgroup
    qk_mma: cute.TiledMma
    own_mma: cute.TiledMma  # P from registers
    other_mma: cute.TiledMma  # P from shared memory
    tSrQ: cute.Tensor  # (1, 1, part / 16, halves)
    tSrK: cute.Tensor  # (1, 1, part / 16, stages * halves)
    tOrP: cute.Tensor  # (1, 1, 64 / 16, 2)
    tOrV: cute.Tensor  # (1, 1, N / 16, stages * halves)
    rP: cute.Tensor  # (64, N) as a left side
    rWords: cute.Tensor  # the same in pairs
    rO: cute.Tensor  # (64, part)
    rPeak: cute.Tensor  # (2) rows: the maxima of this warpgroup's tiles
    rMax: cute.Tensor  # (2): what is subtracted from scores, as of the last tile that O has
    rSum: cute.Tensor  # (2): of this warpgroup's tiles, this lane's share


class Tile(NamedTuple):
    """A tile of keys, counted from the kernel's start: among all, and among those of the warpgroup that has it."""

    n: Int32
    own: Int32


class Start(NamedTuple):
    """How many tiles came before a work tile: all, and those of each warpgroup."""

    all: Int32
    first: Int32
    second: Int32

    def tile(self, n: Int32, half: int) -> Tile:
        """Tile n of the work tile, which warpgroup ``half`` has."""
        return Tile(self.all + n, (self.second if half else self.first) + n // 2)

    def after(self, tiles: Int32) -> Start:
        return Start(self.all + tiles, self.first + (tiles + 1) // 2, self.second + tiles // 2)


class Mainloop:
    """``half``, 0 or 1: which warpgroup this is."""

    def __init__(self, config: Config, half: int):
        self.c, self.half = config, half
        # Whether the halves of the columns have sums of their own. A product rounds its sum towards zero in every step,
        # and many steps of numbers of 11 bits show: with one sum 10 of 1,212 cases on an H200, all of float16, had a
        # row_sum or lse off by up to 1.4 times what is allowed; with two 0.89 times at most.
        self.apart = config.dtype is cutlass.Float16

    @cute.jit
    def run(self, numbers: Numbers, shared: Int32, meeting: Meeting, w: Fragments, start: Start, tiles: Int32):
        """A work tile, of two ``tiles`` at least; leaves its output, maxima and sums in registers."""
        w.rO.fill(0.0)
        w.rPeak.fill(-_INF)
        w.rMax.fill(-_INF)
        w.rSum.fill(0.0)
        if const_expr(self.half == 0):
            self._own(numbers, shared, meeting, w, start, Int32(0), tiles, None)
        else:  # the first tiles' scores are computed together, as nothing waits for their places yet
            self._own(numbers, shared, meeting, w, start, Int32(1), tiles, HALVES)
        for n in cutlass.range(2 + self.half, tiles, 2, unroll=1):
            self._own(numbers, shared, meeting, w, start, n, tiles, self.c.ahead)
        if tiles % 2 == self.half:  # the last is the other's
            last = start.tile(tiles - 1, 1 - self.half)
            self._multiply_other(shared, meeting, w, last)
            warpgroup.wait_group(0)
            self._release_other(meeting, last)

    def fragments(self, shared: Int32) -> Fragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0] % THREADS

        def values(source: warpgroup.OperandSource) -> cute.TiledMma:
            return hopper.make_trivial_tiled_mma(
                c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (HEADS, c.ring.part), source
            )

        qk_mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, (1, 1, 1), (HEADS, c.keys))
        own_mma, other_mma = values(warpgroup.OperandSource.RMEM), values(warpgroup.OperandSource.SMEM)
        sQ = products.staged(c.dtype, c.shared.query.at(shared), (HEADS, c.ring.part, HALVES))
        sKV = products.keys_by_columns(c.ring, c.shared.ring.at(shared))
        sP = products.staged(c.dtype, c.shared.probabilities.at(shared), (HEADS, _P_KEYS, HALVES))
        qk, own, other = (mma.get_slice(thread) for mma in (qk_mma, own_mma, other_mma))
        rP = own.make_fragment_A(own.partition_shape_A((HEADS, c.keys)))
        return Fragments(
            thread=thread,
            qk_mma=qk_mma,
            own_mma=own_mma,
            other_mma=other_mma,
            tSrQ=qk.make_fragment_A(qk.partition_A(sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(sKV)),
            tOrP=other.make_fragment_A(other.partition_A(sP)),
            tOrV=own.make_fragment_B(own.partition_B(products.columns_by_keys(c.ring, sKV))),
            rP=rP,
            rWords=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(own.partition_shape_C((HEADS, c.ring.part)), Float32),
            rPeak=cute.make_rmem_tensor(2, Float32),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )

    @cute.jit
    def _own(
        self, numbers: Numbers, shared: Int32, meeting: Meeting, w: Fragments, start: Start, n: Int32, tiles: Int32,
        ahead: cutlass.Constexpr,
    ):  # fmt: skip
        """Tile n of ``tiles``, which is this warpgroup's, and the output of the tile before, for which products come
        after those for ``ahead`` halves of the scores; None: there is no tile before."""
        tile, before = start.tile(n, self.half), start.tile(n - 1, 1 - self.half)
        rS, rMore = (cute.make_rmem_tensor(w.qk_mma.partition_shape_C((HEADS, self.c.keys)), Float32) for _ in range(2))
        sums = (rS, rMore if const_expr(self.apart) else rS)
        for i in cutlass.range_constexpr(HALVES):
            if const_expr(ahead == i):
                self._multiply_other(shared, meeting, w, before)
            first = const_expr(i == 0 or self.apart)
            self._multiply_keys(meeting, w, sums[i], tile.n, (self.half + i) % HALVES, clear=first)  # as they come
        if const_expr(ahead == HALVES):
            self._multiply_other(shared, meeting, w, before)
        elif const_expr(ahead is not None):
            warpgroup.wait_group(HALVES - ahead)
            self._release_other(meeting, before)
        warpgroup.wait_group(1 if const_expr(ahead == HALVES) else 0)
        if n + 2 >= tiles:
            self._release_query(numbers, meeting)
        if const_expr(self.apart):
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + rMore[i]
        stage = meeting.tiles.slot(tile.n * HALVES) // HALVES
        to_scores(self.c, numbers.scale, meeting.mask(shared), stage, rS)
        cute.arch.sync_warp()  # every lane has read the mask before one of them gives its place back
        for half in cutlass.range_constexpr(HALVES):
            meeting.tiles.release(tile.n * HALVES + half)
        scales = self._probabilities(numbers.lag, w, rS)
        self._hand_over(shared, meeting, w, rS, scales, tile)
        if const_expr(ahead == HALVES):
            warpgroup.wait_group(0)
            self._release_other(meeting, before)
        self._rescale(w, scales)
        softmax.pack_into(w.rWords, rS, self.c.dtype)
        products.multiply(w.own_mma, w.rO, w.rP, self._values(meeting, w, tile.n), clear=False)
        warpgroup.wait_group(0)
        meeting.tiles.release(tile.n * HALVES + self.half)

    def _multiply_keys(
        self, meeting: Meeting, w: Fragments, rS: cute.Tensor, n: Int32, half: int, *, clear: bool
    ) -> None:
        """Issue the products of Q with one half of the columns of tile n's keys."""
        meeting.tiles.wait(n * HALVES + half)
        cute.arch.fence_view_async_shared()
        sK = w.tSrK[None, None, None, meeting.tiles.slot(n * HALVES + half)]
        products.multiply(w.qk_mma, rS, w.tSrQ[None, None, None, half], sK, clear=clear)

    def _release_query(self, numbers: Numbers, meeting: Meeting) -> None:
        """This warp has its last scores of the work tile."""
        if self.c.merge:  # the only one
            meeting.tell_read(numbers.ctas)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(meeting.query.empty)

    @cute.jit
    def _probabilities(self, lag: Float32, w: Fragments, rS: cute.Tensor):
        """Scores to probabilities in place; returns the factors of the output so far.

        What is subtracted follows a row's maximum when that is ``lag`` above it: seldom after the first tiles, so that
        the output is seldom rescaled.
        """
        scales = []
        for r in cutlass.range_constexpr(2):
            peak, old = softmax.peak(rS, r), w.rMax[r]
            w.rPeak[r] = cute.arch.fmax(w.rPeak[r], peak)
            w.rMax[r] = cutlass.select_(peak > old + lag, peak, old)
            base = finite(w.rMax[r])
            scales.append(exp2(old - base))
            sums = [w.rSum[r] * scales[r], Float32(0.0)]
            for i in cutlass.range_constexpr(2 * r, cute.size(rS), 4):
                for x in cutlass.range_constexpr(2):
                    rS[i + x] = exp2(rS[i + x] - base)
                    sums[x] = sums[x] + rS[i + x]
            w.rSum[r] = sums[0] + sums[1]
        return scales

    @cute.jit
    def _hand_over(
        self, shared: Int32, meeting: Meeting, w: Fragments, rS: cute.Tensor, scales: list[Float32], tile: Tile
    ):
        """The probabilities of a tile, the maxima and the factors of the output before it, to the other warpgroup."""
        c = self.c
        row, lane = products.first_row(w.thread), w.thread & 31
        sFactor, sMax = by_head(c.shared.factors, shared), by_head(c.shared.maxima, shared)
        full = meeting.probabilities[self.half].await_empty(tile.own)
        if (lane & 3) == 0:
            for r in cutlass.range_constexpr(2):
                sFactor[row + 8 * r, self.half] = scales[r]
                sMax[row + 8 * r, self.half] = w.rMax[r]
        address = c.shared.probabilities.at(shared) + (self.half * c.p_bytes + row * ROW_BYTES + (lane & 3) * 4)
        pairs = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
        sP = cute.make_tensor(pairs, cute.make_layout((2, 8), stride=(256, 4)))  # (8 rows, chunk)
        for i in cutlass.range_constexpr(c.keys // 8):
            for r in cutlass.range_constexpr(2):
                sP[r, (row & 7) ^ i] = softmax.pack(rS[4 * i + 2 * r], rS[4 * i + 2 * r + 1], c.dtype)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def _multiply_other(self, shared: Int32, meeting: Meeting, w: Fragments, tile: Tile):
        """Issue the output of a tile whose probabilities are the other warpgroup's."""
        c, other = self.c, const_expr(1 - self.half)
        row = products.first_row(w.thread)
        meeting.probabilities[other].wait(tile.own)
        scales = []
        for r in cutlass.range_constexpr(2):
            scales.append(by_head(c.shared.factors, shared)[row + 8 * r, other])
            w.rMax[r] = by_head(c.shared.maxima, shared)[row + 8 * r, other]
            w.rSum[r] = w.rSum[r] * scales[r]
        self._rescale(w, scales)
        sP = w.tOrP[None, None, None, other]
        products.multiply(w.other_mma, w.rO, sP, self._values(meeting, w, tile.n), clear=False)

    @cute.jit
    def _rescale(self, w: Fragments, scales: list[Float32]):
        """Bring the output to the new maxima."""
        if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
            softmax.rescale(w.rO, scales)

    def _values(self, meeting: Meeting, w: Fragments, n: Int32) -> cute.Tensor:
        return w.tOrV[None, None, None, meeting.tiles.slot(n * HALVES + self.half)]

    def _release_other(self, meeting: Meeting, tile: Tile) -> None:
        cute.arch.sync_warp()  # every lane has read its factors before one of them gives their place back
        meeting.probabilities[1 - self.half].release(tile.own)
        meeting.tiles.release(tile.n * HALVES + self.half)
