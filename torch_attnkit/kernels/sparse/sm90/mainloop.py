"""Consumer mainloop: each warpgroup scores every second tile and owns half of O's columns.

    warpgroup 0   S0 softmax0 P0 O+=P0 |       S2, O+=P1, S2 softmax2 P2 O+=P2 | ...
    warpgroup 1         S1 S1 O+=P0 softmax1 P1 O+=P1 |       S3, O+=P2, S3 ...

O of 64 x 512 exceeds one warpgroup's registers. A warpgroup multiplies its own P from registers and passes it to the
other through shared memory, with row maxima and rescale factors. Maxima are chained from tile to tile, so results do
not depend on which warpgroup is faster.
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
from torch_attnkit.cuda.sm90 import softmax, wgmma
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars
from .barriers import Barriers, by_head
from .config import HALVES, LOADERS, Config

_INF = float("inf")


@cute.jit
def to_scores(config: cutlass.Constexpr, scale: Float32, mask: cute.Tensor, stage: Int32, rS: cute.Tensor):
    """Scale S to powers of two, and -inf where ``mask`` (stages, 4) has no bit for a key."""
    for i in cutlass.range_constexpr(cute.size(rS)):
        rS[i] = rS[i] * scale
    words = [mask[stage, i] for i in range(LOADERS)]
    if (words[0] & words[1] & words[2] & words[3]) != const_expr((1 << config.keys // LOADERS) - 1):
        quad = cute.arch.lane_idx() & 3
        odd = (quad & 1) != 0
        # Validity of this lane's two columns: bit 2 i for group i of 8 columns.
        masks = [cutlass.select_(odd, words[b + 2], words[b]) >> (quad // 2) for b in range(2)]
        for i in cutlass.range_constexpr(cute.size(rS)):
            bit = masks[i % 2] & const_expr(1 << i // 4 * 2)
            rS[i] = cutlass.select_(bit != 0, rS[i], Float32(-_INF))


_INF = float("inf")
_P_KEYS = 64  # columns of a buffer of probabilities, of which as many are used as a tile has keys


@dataclass
class Fragments(Fixed):
    """A warpgroup's MMA fragments, accumulators and softmax statistics."""

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
    """A K/V tile's index since kernel start: among all tiles, and among those that its warpgroup scored."""

    n: Int32
    own: Int32


class Start(NamedTuple):
    """Tiles before a work tile: all, and those that each warpgroup scored."""

    all: Int32
    first: Int32
    second: Int32

    def tile(self, n: Int32, half: int) -> Tile:
        """Tile n of the work tile, scored by warpgroup ``half``."""
        return Tile(self.all + n, (self.second if half else self.first) + n // 2)

    def after(self, tiles: Int32) -> Start:
        return Start(self.all + tiles, self.first + (tiles + 1) // 2, self.second + tiles // 2)


class Mainloop:
    """``half``: index of the warpgroup, and of its columns of O."""

    def __init__(self, config: Config, half: int):
        self.c, self.half = config, half
        # Separate accumulators for the halves of D. wgmma truncates its accumulator in every step, which many steps of
        # float16 show: with one sum 10 of 1,212 cases on an H200, all of float16, had a
        # row_sum or lse off by up to 1.4 times what is allowed; with two 0.89 times at most.
        self.apart = config.dtype is cutlass.Float16

    @cute.jit
    def run(self, scalars: Scalars, shared: Int32, barriers: Barriers, w: Fragments, start: Start, tiles: Int32):
        """All ``tiles``, at least two, of a work tile; leaves O, maxima and sums in registers."""
        w.rO.fill(0.0)
        w.rPeak.fill(-_INF)
        w.rMax.fill(-_INF)
        w.rSum.fill(0.0)
        if const_expr(self.half == 0):
            self._own(scalars, shared, barriers, w, start, Int32(0), tiles, None)
        else:  # both warpgroups score their first tile at once
            self._own(scalars, shared, barriers, w, start, Int32(1), tiles, HALVES)
        for n in cutlass.range(2 + self.half, tiles, 2, unroll=1):
            self._own(scalars, shared, barriers, w, start, n, tiles, self.c.ahead)
        if tiles % 2 == self.half:  # the other warpgroup scored the last tile
            last = start.tile(tiles - 1, 1 - self.half)
            self._multiply_other(shared, barriers, w, last)
            warpgroup.wait_group(0)
            self._release_other(barriers, last)

    def fragments(self, shared: Int32) -> Fragments:
        c, K, MN = self.c, OperandMajorMode.K, OperandMajorMode.MN
        thread = cute.arch.thread_idx()[0] % THREADS

        def values(source: warpgroup.OperandSource) -> cute.TiledMma:
            return hopper.make_trivial_tiled_mma(
                c.dtype, c.dtype, K, MN, Float32, (1, 1, 1), (HEADS, c.ring.part), source
            )

        qk_mma = hopper.make_trivial_tiled_mma(c.dtype, c.dtype, K, K, Float32, (1, 1, 1), (HEADS, c.keys))
        own_mma, other_mma = values(warpgroup.OperandSource.RMEM), values(warpgroup.OperandSource.SMEM)
        sQ = wgmma.staged(c.dtype, c.shared.query.at(shared), (HEADS, c.ring.part, HALVES))
        sKV = wgmma.keys_by_columns(c.ring, c.shared.ring.at(shared))
        sP = wgmma.staged(c.dtype, c.shared.probabilities.at(shared), (HEADS, _P_KEYS, HALVES))
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
            tOrV=own.make_fragment_B(own.partition_B(wgmma.columns_by_keys(c.ring, sKV))),
            rP=rP,
            rWords=cute.recast_tensor(rP, Int32),
            rO=cute.make_rmem_tensor(own.partition_shape_C((HEADS, c.ring.part)), Float32),
            rPeak=cute.make_rmem_tensor(2, Float32),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )

    @cute.jit
    def _own(
        self, scalars: Scalars, shared: Int32, barriers: Barriers, w: Fragments, start: Start, n: Int32, tiles: Int32,
        ahead: cutlass.Constexpr,
    ):  # fmt: skip
        """Score and multiply tile n, which is this warpgroup's, and multiply P of tile n - 1, issued after ``ahead``
        halves of the scores; None: there is no tile n - 1."""
        tile, before = start.tile(n, self.half), start.tile(n - 1, 1 - self.half)
        rS, rMore = (cute.make_rmem_tensor(w.qk_mma.partition_shape_C((HEADS, self.c.keys)), Float32) for _ in range(2))
        sums = (rS, rMore if const_expr(self.apart) else rS)
        for i in cutlass.range_constexpr(HALVES):
            if const_expr(ahead == i):
                self._multiply_other(shared, barriers, w, before)
            first = const_expr(i == 0 or self.apart)
            self._multiply_keys(barriers, w, sums[i], tile.n, (self.half + i) % HALVES, clear=first)
        if const_expr(ahead == HALVES):
            self._multiply_other(shared, barriers, w, before)
        elif const_expr(ahead is not None):
            warpgroup.wait_group(HALVES - ahead)
            self._release_other(barriers, before)
        warpgroup.wait_group(1 if const_expr(ahead == HALVES) else 0)
        if n + 2 >= tiles:
            self._release_query(scalars, barriers)
        if const_expr(self.apart):
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = rS[i] + rMore[i]
        stage = barriers.tiles.slot(tile.n * HALVES) // HALVES
        to_scores(self.c, scalars.scale, barriers.mask(shared), stage, rS)
        cute.arch.sync_warp()  # every lane has read the mask
        for half in cutlass.range_constexpr(HALVES):
            barriers.tiles.release(tile.n * HALVES + half)
        scales = self._probabilities(scalars.rescale_threshold, w, rS)
        self._send_probabilities(shared, barriers, w, rS, scales, tile)
        if const_expr(ahead == HALVES):
            warpgroup.wait_group(0)
            self._release_other(barriers, before)
        self._rescale(w, scales)
        softmax.pack_into(w.rWords, rS, self.c.dtype)
        wgmma.multiply(w.own_mma, w.rO, w.rP, self._values(barriers, w, tile.n), clear=False)
        warpgroup.wait_group(0)
        barriers.tiles.release(tile.n * HALVES + self.half)

    def _multiply_keys(
        self, barriers: Barriers, w: Fragments, rS: cute.Tensor, n: Int32, half: int, *, clear: bool
    ) -> None:
        """Issue S += Q K' over half of the columns of tile n."""
        barriers.tiles.wait(n * HALVES + half)
        cute.arch.fence_view_async_shared()
        sK = w.tSrK[None, None, None, barriers.tiles.slot(n * HALVES + half)]
        wgmma.multiply(w.qk_mma, rS, w.tSrQ[None, None, None, half], sK, clear=clear)

    def _release_query(self, scalars: Scalars, barriers: Barriers) -> None:
        """This warp's last scores of the work tile are done."""
        if self.c.split_kv:  # the CTA's only work tile
            barriers.arrive_query_read(scalars.ctas)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers.query.empty)

    @cute.jit
    def _probabilities(self, rescale_threshold: Float32, w: Fragments, rS: cute.Tensor):
        """Online softmax, S to P in place; returns the rescale factors of O. The subtracted maximum follows a row's
        maximum only when that has grown by ``rescale_threshold``, so that O is seldom rescaled (FlashAttention-4)."""
        scales = []
        for r in cutlass.range_constexpr(2):
            peak, old = softmax.peak(rS, r), w.rMax[r]
            w.rPeak[r] = cute.arch.fmax(w.rPeak[r], peak)
            w.rMax[r] = cutlass.select_(peak > old + rescale_threshold, peak, old)
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
    def _send_probabilities(
        self, shared: Int32, barriers: Barriers, w: Fragments, rS: cute.Tensor, scales: list[Float32], tile: Tile
    ):
        """Pass P, maxima and rescale factors of a tile to the other warpgroup."""
        c = self.c
        row, lane = wgmma.first_row(w.thread), w.thread & 31
        sFactor, sMax = by_head(c.shared.factors, shared), by_head(c.shared.maxima, shared)
        full = barriers.probabilities[self.half].await_empty(tile.own)
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
    def _multiply_other(self, shared: Int32, barriers: Barriers, w: Fragments, tile: Tile):
        """Issue O += P V with the other warpgroup's P."""
        c, other = self.c, const_expr(1 - self.half)
        row = wgmma.first_row(w.thread)
        barriers.probabilities[other].wait(tile.own)
        scales = []
        for r in cutlass.range_constexpr(2):
            scales.append(by_head(c.shared.factors, shared)[row + 8 * r, other])
            w.rMax[r] = by_head(c.shared.maxima, shared)[row + 8 * r, other]
            w.rSum[r] = w.rSum[r] * scales[r]
        self._rescale(w, scales)
        sP = w.tOrP[None, None, None, other]
        wgmma.multiply(w.other_mma, w.rO, sP, self._values(barriers, w, tile.n), clear=False)

    @cute.jit
    def _rescale(self, w: Fragments, scales: list[Float32]):
        """Rescale O, unless every factor in the warp is 1."""
        if cute.arch.vote_any_sync((scales[0] != 1.0) | (scales[1] != 1.0)):
            softmax.rescale(w.rO, scales)

    def _values(self, barriers: Barriers, w: Fragments, n: Int32) -> cute.Tensor:
        return w.tOrV[None, None, None, barriers.tiles.slot(n * HALVES + self.half)]

    def _release_other(self, barriers: Barriers, tile: Tile) -> None:
        cute.arch.sync_warp()  # every lane has read its factors
        barriers.probabilities[1 - self.half].release(tile.own)
        barriers.tiles.release(tile.n * HALVES + self.half)
