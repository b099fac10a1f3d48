"""Both products and the online softmax of a K/V tile by ``mma.sync``; K is V, so one tile in shared memory serves both.

    S = Q K'        a warp has 16 heads and a group of the tile's keys; row maxima meet in shared memory
    P               rounded to 16 bits into shared memory; each warp keeps row sums of its own keys
    O += P V        a warp has all heads, and ``columns`` of D, in registers

CTA barriers of a tile: row maxima are there; P is there. The one at which the next tile has come is the kernel's.
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
from torch_attnkit.cuda.smem import CHUNK
from torch_attnkit.cuda.warp_ops import exp2

from ..arguments import Scalars
from .config import ATOM, ITEMSIZE, Config
from .load import swizzled

_INF = float("inf")
_COLUMNS = 8  # of an MMA
_LINE = 128  # bytes within which a row's chunks are swizzled


@dataclass
class Fragments(Fixed):
    """Registers of a warp. Rows are heads: lane l has row l / 4 of each 16, and the one 8 below."""

    heads: Int32  # first of its group of heads for the scores
    group: Int32  # its group of keys for the scores
    lane: Int32
    rO: cute.Tensor  # (4, head groups, columns / 8)
    row_max: cute.Tensor  # (2, head groups), in powers of two, as subtracted
    row_sum: cute.Tensor  # (2): this lane's part, of the heads and keys of its scores


class Mainloop(Fixed):
    def __init__(self, config: Config):
        self.c = config
        self.group_keys = config.keys // config.key_groups  # keys that a warp scores
        # Sums of Q K' that are added up at the end: shorter chains of products, and of the tensor cores' roundings.
        self.chains = 4 if config.dim > 256 else 2
        self.p_pitch = config.keys * ITEMSIZE

    def fragments(self) -> Fragments:
        c, warp = self.c, cute.arch.warp_idx()
        rO = cute.make_rmem_tensor(cute.make_layout((4, c.head_groups, c.columns // _COLUMNS)), Float32)
        row_max = cute.make_rmem_tensor(cute.make_layout((2, c.head_groups)), Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        rO.fill(0.0)
        row_max.fill(-_INF)
        row_sum.fill(0.0)
        return Fragments(
            warp // c.key_groups * ATOM, warp % c.key_groups, cute.arch.lane_idx(), rO, row_max, row_sum
        )  # fmt: skip

    def stats(self, shared: Int32) -> cute.Tensor:
        """(heads, key groups)"""
        c = self.c
        at = cute.make_ptr(Float32, c.shared.stats.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(at, cute.make_layout((c.heads, c.key_groups), stride=(c.key_groups, 1)))

    @cute.jit
    def tile(self, scalars: Scalars, w: Fragments, shared: Int32, sK: Int32, valid: Int32):
        """A tile whose keys are at ``sK`` and their validity at ``valid``."""
        rS = self._scores(scalars, w, shared, sK, valid)
        self._send_maxima(w, shared, rS)
        cute.arch.barrier()
        scales = self._new_maxima(scalars, w, shared)
        self._send_probabilities(w, shared, rS, scales)
        cute.arch.barrier()
        self._rescale(w, scales)
        self._add_values(w, shared, sK)

    def _offsets(self, row: Int32, first: Any, step: int, count: int) -> list[Int32]:
        """Offsets of a lane's chunks ``first + i step`` of a row: those of one line, the others follow by lines."""
        each = min(count, _LINE // CHUNK // step)
        return [swizzled(row, first + i * step) for i in range(each)]

    def _chunk(self, offsets: list[Int32], i: int) -> Int32:
        each = len(offsets)
        return offsets[i % each] + i // each * _LINE

    @cute.jit
    def _scores(self, scalars: Scalars, w: Fragments, shared: Int32, sK: Int32, valid: Int32):
        """S of the warp's heads and keys (4, keys / 8), in powers of two; -inf for keys that do not count."""
        c, lane = self.c, w.lane
        n_tiles, steps = const_expr(self.group_keys // _COLUMNS), const_expr(c.dim // ATOM)
        rSum = cute.make_rmem_tensor(cute.make_layout((4, self.chains, n_tiles)), Float32)
        rSum.fill(0.0)
        head, key = w.heads + lane % ATOM, w.group * self.group_keys + lane % 8
        sQ = c.shared.query.at(shared) + head * c.pitch
        sKeys = sK + key * c.pitch
        # Of Q 16 heads by 16 columns at a time, of K 8 keys by 32.
        of_q = self._offsets(head, lane // ATOM, 2, steps)
        of_k = self._offsets(key, lane // 8, 4, steps // 2)
        for k in cutlass.range_constexpr(0, steps, 2):
            rQ = [op.ldmatrix_x4(sQ + self._chunk(of_q, k + i)) for i in range(2)]
            for n in cutlass.range_constexpr(n_tiles):
                rK = op.ldmatrix_x4(sKeys + n * _COLUMNS * c.pitch + self._chunk(of_k, k // 2))
                for i in cutlass.range_constexpr(2):
                    j = const_expr((k + i) % self.chains)
                    old = [rSum[x, j, n] for x in range(4)]
                    new = op.mma_m16n8k16(c.dtype, rQ[i], rK[2 * i : 2 * i + 2], old)
                    for x in cutlass.range_constexpr(4):
                        rSum[x, j, n] = new[x]
        rS = cute.make_rmem_tensor(cute.make_layout((4, n_tiles)), Float32)
        words = cute.make_ptr(Int32, valid, cute.AddressSpace.smem, assumed_align=8)
        counts = cute.make_tensor(words, cute.make_layout(c.keys))
        first = w.group * self.group_keys + lane % 4 * 2
        for n in cutlass.range_constexpr(n_tiles):
            for x in cutlass.range_constexpr(2):
                seen = counts[first + n * _COLUMNS + x] != 0
                for r in cutlass.range_constexpr(2):
                    i = const_expr(2 * r + x)
                    score = rSum[i, 0, n] + rSum[i, 1, n]
                    if const_expr(self.chains == 4):
                        score += rSum[i, 2, n] + rSum[i, 3, n]
                    rS[i, n] = cutlass.select_(seen, score * scalars.scale, Float32(-_INF))
        return rS

    @cute.jit
    def _send_maxima(self, w: Fragments, shared: Int32, rS: cute.Tensor):
        stats = self.stats(shared)
        for r in cutlass.range_constexpr(2):
            peak = cute.arch.fmax(rS[2 * r, 0], rS[2 * r + 1, 0])
            for n in cutlass.range_constexpr(1, rS.shape[1]):
                peak = cute.arch.fmax(peak, cute.arch.fmax(rS[2 * r, n], rS[2 * r + 1, n]))
            for distance in cutlass.range_constexpr(1, 3):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, distance))
            if w.lane % 4 == 0:
                stats[w.heads + w.lane // 4 + 8 * r, w.group] = peak

    @cute.jit
    def _new_maxima(self, scalars: Scalars, w: Fragments, shared: Int32):
        """Factors that rescale O, in the order of ``row_max``. The subtracted maximum follows a row's maximum only when
        that has grown by ``rescale_threshold``, so that O is seldom rescaled (FlashAttention-4)."""
        c, stats = self.c, self.stats(shared)
        scales = []
        for m in cutlass.range_constexpr(c.head_groups):
            for r in cutlass.range_constexpr(2):
                row, old = m * ATOM + w.lane // 4 + 8 * r, w.row_max[r, m]
                peak = stats[row, 0]
                for n in cutlass.range_constexpr(1, c.key_groups):
                    peak = cute.arch.fmax(peak, stats[row, n])
                w.row_max[r, m] = cutlass.select_(peak > old + scalars.rescale_threshold, peak, old)
                scales.append(exp2(old - finite(w.row_max[r, m])))
        return scales

    def _own(self, w: Fragments, values: list[Float32], r: int) -> Float32:
        """Of values of all heads those of the warp's scores."""
        if self.c.head_groups == 1:
            return values[r]
        return cutlass.select_(w.heads == 0, values[r], values[2 + r])

    def p_chunk(self, shared: Int32, row: Int32, chunk: Any) -> Int32:
        """Address of 8 keys of a row of P; of rows of 64 bytes two share a line."""
        line = row // (_LINE // self.p_pitch)
        across = self.p_pitch // CHUNK - 1
        return self.c.shared.probabilities.at(shared) + row * self.p_pitch + (chunk ^ (line & across)) * CHUNK

    @cute.jit
    def _send_probabilities(self, w: Fragments, shared: Int32, rS: cute.Tensor, scales: list[Float32]):
        c = self.c
        maxima = [w.row_max[r, m] for m in range(c.head_groups) for r in range(2)]
        for r in cutlass.range_constexpr(2):
            base, row = finite(self._own(w, maxima, r)), w.heads + w.lane // 4 + 8 * r
            sums = [w.row_sum[r] * self._own(w, scales, r), Float32(0.0)]
            for n in cutlass.range_constexpr(rS.shape[1]):
                p = [exp2(rS[2 * r + x, n] - base) for x in range(2)]
                sums = [sums[x] + p[x] for x in range(2)]
                at = self.p_chunk(shared, row, w.group * (self.group_keys // _COLUMNS) + n) + w.lane % 4 * 4
                pair = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(pair, cute.make_layout(1))[0] = op.pack(c.dtype, *p)
            w.row_sum[r] = sums[0] + sums[1]

    @cute.jit
    def _rescale(self, w: Fragments, scales: list[Float32]):
        """Rescale O, unless every factor in the warp is 1."""
        changed = scales[0] != 1.0
        for scale in scales[1:]:
            changed = changed | (scale != 1.0)
        if cute.arch.vote_any_sync(changed):
            for i in cutlass.range_constexpr(cute.size(w.rO)):
                w.rO[i] = w.rO[i] * scales[i // 2 % (2 * self.c.head_groups)]

    @cute.jit
    def _add_values(self, w: Fragments, shared: Int32, sV: Int32):
        c, lane = self.c, w.lane
        key = lane % ATOM
        count = const_expr(c.columns // ATOM)
        first = cute.arch.warp_idx() * (c.columns * ITEMSIZE // CHUNK) + lane // ATOM
        at, offsets = sV + key * c.pitch, self._offsets(key, first, 2, count)
        for k in cutlass.range_constexpr(c.keys // ATOM):
            rows = [m * ATOM + lane % ATOM for m in range(c.head_groups)]
            rP = [op.ldmatrix_x4(self.p_chunk(shared, row, 2 * k + lane // ATOM)) for row in rows]
            for n in cutlass.range_constexpr(count):
                rV = op.ldmatrix_x4(at + k * ATOM * c.pitch + self._chunk(offsets, n), transposed=True)
                for m in cutlass.range_constexpr(c.head_groups):
                    for half in cutlass.range_constexpr(2):
                        old = [w.rO[x, m, 2 * n + half] for x in range(4)]
                        new = op.mma_m16n8k16(c.dtype, rP[m], rV[2 * half : 2 * half + 2], old)
                        for x in cutlass.range_constexpr(4):
                            w.rO[x, m, 2 * n + half] = new[x]
