"""Both products and the online softmax of a K/V tile by ``mma.sync``; K is V, so one tile in shared memory serves both.

    scores   a warp has all rows and keys, and ``columns`` of D: Q of these in registers, partial sums to shared memory
    softmax  a warp has a few rows with all keys: adds the warps' sums, online softmax, P in 16 bits to shared memory
    O        a warp has all rows, and its ``columns`` of D again: rescaled, then O += P V

CTA barriers of a tile: partial sums are there; P and the factors are. The one at which the next tile has come is the
kernel's. A warp reads no columns of a tile but its own, and each of them once for either product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import finite
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK, Region
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars
from .config import ATOM, ITEMSIZE, WORD, Config
from .load import shared_words, store_shared_words, swizzled

_INF = float("inf")
_COLUMNS = 8  # of an MMA
_LINE = 128  # bytes within which a row's chunks are swizzled
_SEGMENT = _COLUMNS * WORD  # bytes of partial sums that four lanes have of a row


@dataclass
class Fragments(Fixed):
    """Registers of a warp. Rows are heads: in products lane l has row l / 4 of each 16, and the one 8 below."""

    lane: Int32
    row: Int32  # the head of this lane's in the softmax
    part: Int32  # which of the row's lanes this is
    rQ: list[tuple[Int32, ...]]  # (columns / 16, row groups) operands
    rO: cute.Tensor  # (4, row groups, columns / 8)
    row_max: cute.Tensor  # (1), of ``row``: in powers of two, as subtracted
    row_sum: cute.Tensor  # (1), of this lane's keys of ``row``


class Mainloop(Fixed):
    def __init__(self, config: Config):
        self.c = config
        self.p_pitch = config.keys * ITEMSIZE

    def fragments(self, shared: Int32) -> Fragments:
        """Q is in shared memory; nobody writes over it before a barrier behind this."""
        c, lane, warp = self.c, cute.arch.lane_idx(), cute.arch.warp_idx()
        rO = cute.make_rmem_tensor(cute.make_layout((4, c.row_groups, c.columns // _COLUMNS)), Float32)
        row_max, row_sum = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        rO.fill(0.0)
        row_max.fill(-_INF)
        row_sum.fill(0.0)
        head = lane % ATOM
        sQ, offsets = c.shared.query.at(shared) + head * c.pitch, self._offsets(head, lane // ATOM)
        rQ = [
            op.ldmatrix_x4(sQ + m * ATOM * c.pitch + self._chunk(offsets, k))
            for k in range(c.columns // ATOM)
            for m in range(c.row_groups)
        ]
        row = warp * (c.rows // c.warps) + lane // c.row_lanes
        return Fragments(lane, row, lane % c.row_lanes, rQ, rO, row_max, row_sum)

    def by_head(self, region: Region, shared: Int32) -> cute.Tensor:
        """(rows)"""
        at = cute.make_ptr(Float32, region.at(shared), cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(at, cute.make_layout(self.c.rows))

    @cute.jit
    def tile(self, scalars: Scalars, w: Fragments, shared: Int32, sKV: Int32, valid: Int32):
        """A tile whose keys are at ``sKV`` and their validity at ``valid``."""
        self._multiply_keys(w, shared, sKV)
        cute.arch.barrier()
        self._softmax(scalars, w, shared, valid)
        cute.arch.barrier()
        self._rescale(w, shared)
        self._add_values(w, shared, sKV)

    def _offsets(self, row: Int32, half: Int32) -> list[Int32]:
        """Offsets of a lane's chunks of a row, one of each 16 of the warp's columns: those of the first line; the
        others follow by lines."""
        first = cute.arch.warp_idx() * (self.c.columns * ITEMSIZE // CHUNK) + half
        steps = min(self.c.columns // ATOM, _LINE // (ATOM * ITEMSIZE))
        return [swizzled(row, first + 2 * k) for k in range(steps)]

    def _chunk(self, offsets: list[Int32], k: int) -> Int32:
        return offsets[k % len(offsets)] + k // len(offsets) * _LINE

    def _partials(self, shared: Int32, warp: Any, row: Int32) -> Int32:
        """Address of a warp's sums of a row."""
        return self.c.shared.partials.at(shared) + (warp * self.c.rows + row) * (self.c.keys * WORD)

    @cute.jit
    def _multiply_keys(self, w: Fragments, shared: Int32, sK: Int32):
        """Q K' over the warp's columns, to shared memory."""
        c, lane = self.c, w.lane
        n_tiles = const_expr(c.keys // _COLUMNS)
        rS = cute.make_rmem_tensor(cute.make_layout((4, c.row_groups, n_tiles)), Float32)
        rS.fill(0.0)
        key = lane // ATOM * 8 + lane % 8
        at, offsets = sK + key * c.pitch, self._offsets(key, lane // 8 % 2)
        for k in cutlass.range_constexpr(c.columns // ATOM):
            for n in cutlass.range_constexpr(0, n_tiles, 2):
                rK = op.ldmatrix_x4(at + n * _COLUMNS * c.pitch + self._chunk(offsets, k))
                for m in cutlass.range_constexpr(c.row_groups):
                    self._multiply(w.rQ[k * c.row_groups + m], rK, rS, m, n)
        for m in cutlass.range_constexpr(c.row_groups):
            for r in cutlass.range_constexpr(2):
                row = m * ATOM + lane // 4 + 8 * r
                sums = self._partials(shared, cute.arch.warp_idx(), row) + lane % 4 * (2 * WORD)
                for n in cutlass.range_constexpr(n_tiles):
                    pair = [rS[2 * r + x, m, n].bitcast(Int32) for x in range(2)]
                    store_shared_words(sums + (n ^ (row & 3)) * _SEGMENT, pair)

    def _multiply(self, a: Any, b: Any, acc: cute.Tensor, m: int, n: int) -> None:
        """16 rows times 16 columns, the n-th eight of ``acc`` and the next."""
        for half in range(2):
            old = [acc[i, m, n + half] for i in range(4)]
            new = op.mma_m16n8k16(self.c.dtype, a, b[2 * half : 2 * half + 2], old)
            for i in range(4):
                acc[i, m, n + half] = new[i]

    @cute.jit
    def _softmax(self, scalars: Scalars, w: Fragments, shared: Int32, valid: Int32):
        """Of this lane's keys of its row. The subtracted maximum follows the row's maximum only when that has grown by
        ``rescale_threshold``, so that O is seldom rescaled (FlashAttention-4)."""
        c = self.c
        scores = self._scores(scalars, w, shared, valid)
        peak = scores[0]
        for score in scores[1:]:
            peak = cute.arch.fmax(peak, score)
        for distance in self._distances():
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, distance))
        old = w.row_max[0]
        w.row_max[0] = cutlass.select_(peak > old + scalars.rescale_threshold, peak, old)
        base = finite(w.row_max[0])
        factor = exp2(old - base)
        p = [exp2(score - base) for score in scores]
        w.row_sum[0] = w.row_sum[0] * factor + self._tree(p)
        sFactors, row = self.by_head(c.shared.factors, shared), w.row
        if w.part == 0:
            sFactors[row] = factor
        words = [op.pack(c.dtype, *p[i : i + 2]) for i in range(0, len(p), 2)]
        key = w.part * c.lane_keys
        store_shared_words(self._p_chunk(shared, w.row, key // _COLUMNS) + key % _COLUMNS * ITEMSIZE, words)

    def _scores(self, scalars: Scalars, w: Fragments, shared: Int32, valid: Int32) -> list[Float32]:
        """Of this lane's keys of its row, in powers of two; -inf for keys that do not count."""
        c, found = self.c, []
        some = min(c.lane_keys, CHUNK // WORD)
        for i in range(0, c.lane_keys, some):
            key = w.part * c.lane_keys + i
            at = (key // _COLUMNS ^ (w.row & 3)) * _SEGMENT + key % _COLUMNS * WORD
            sums = [shared_words(some, self._partials(shared, warp, w.row) + at) for warp in range(c.warps)]
            counts = shared_words(some, valid + key * WORD)
            for x in range(some):
                score = self._tree([words[x].bitcast(Float32) for words in sums]) * scalars.scale
                found.append(cutlass.select_(counts[x] != 0, score, Float32(-_INF)))
        return found

    def _tree(self, values: list[Float32]) -> Float32:
        """Their sum, neighbours first."""
        while len(values) > 1:
            values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
        return values[0]

    def _distances(self) -> list[int]:
        """Between lanes of a row, to exchange with in turn."""
        return [1 << i for i in range(self.c.row_lanes.bit_length() - 1)]

    def total(self, w: Fragments) -> Float32:
        """The row's sum over all keys."""
        found = w.row_sum[0]
        for distance in self._distances():
            found += cute.arch.shuffle_sync_bfly(found, distance)
        return found

    def _p_chunk(self, shared: Int32, row: Int32, chunk: Any) -> Int32:
        """Address of 8 keys of a row of P; of rows of 64 bytes two share a line."""
        line, across = row // (_LINE // self.p_pitch), self.p_pitch // CHUNK - 1
        return self.c.shared.probabilities.at(shared) + row * self.p_pitch + (chunk ^ (line & across)) * CHUNK

    @cute.jit
    def _rescale(self, w: Fragments, shared: Int32):
        """Rescale O, unless every factor in the warp is 1."""
        factors = self.of_rows(w, self.by_head(self.c.shared.factors, shared))
        changed = factors[0] != 1.0
        for factor in factors[1:]:
            changed = changed | (factor != 1.0)
        if cute.arch.vote_any_sync(changed):
            self._multiply_rows(w.rO, factors)

    def _multiply_rows(self, rO: cute.Tensor, factors: list[Float32]) -> None:
        for i in range(cute.size(rO)):
            rO[i] = rO[i] * factors[i // 2 % len(factors)]

    def rows(self, w: Fragments) -> list[tuple[int, int, Int32]]:
        """(row group, which of this lane's two, row) of O in registers."""
        return [(m, r, m * ATOM + w.lane // 4 + 8 * r) for m in range(self.c.row_groups) for r in range(2)]

    def of_rows(self, w: Fragments, values: cute.Tensor) -> list[Float32]:
        """What ``values`` (rows) has for each of ``rows``."""
        return [values[row] for _, _, row in self.rows(w)]

    @cute.jit
    def _add_values(self, w: Fragments, shared: Int32, sV: Int32):
        c, lane = self.c, w.lane
        key = lane % ATOM
        at, offsets = sV + key * c.pitch, self._offsets(key, lane // ATOM)
        for k in cutlass.range_constexpr(c.keys // ATOM):
            rows = [m * ATOM + lane % ATOM for m in range(c.row_groups)]
            rP = [op.ldmatrix_x4(self._p_chunk(shared, row, 2 * k + lane // ATOM)) for row in rows]
            for n in cutlass.range_constexpr(c.columns // ATOM):
                rV = op.ldmatrix_x4(at + k * ATOM * c.pitch + self._chunk(offsets, n), transposed=True)
                for m in cutlass.range_constexpr(c.row_groups):
                    self._multiply(rP[m], rV, w.rO, m, 2 * n)
