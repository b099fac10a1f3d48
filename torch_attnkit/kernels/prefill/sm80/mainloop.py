"""Both products and the softmax of a block of keys, by ``mma.sync``: a warp has 16 rows for each of its ``atoms``.

An accumulator of ``mma.m16n8`` has its numbers where 8 columns of one of ``wgmma`` have them, so that masks, softmax
and epilogue are Hopper's.
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
from torch_attnkit.cuda.sm90 import softmax
from torch_attnkit.cuda.warp_ops import exp2

from .config import MmaConfig
from .elements import elements
from .tiles import ATOM

_SLACK = 8.0  # of float16's 16 powers of two above 1, what a probability may use


@dataclass
class WarpRows(Fixed):
    """16 rows of a warp: their output, their statistics, and Q where it is in registers."""

    row: Int32  # this lane's first of the tile; the other is 8 below
    lane: Int32
    rO: cute.Tensor  # (4, Dv / 8), float32
    row_max: cute.Tensor  # (2), of this lane's rows; unscaled
    row_sum: cute.Tensor  # (2), this lane's part
    scalars: Any
    query: Int32  # the address of this lane's row of Q for ldmatrix
    rQ: list  # of each step the operands of its blocks of 16 columns, or empty


class MmaMainloop(Fixed):
    def __init__(self, config: MmaConfig):
        self.c, self.elements = config, elements(config)

    def rows(self, sQ: Int32, scalars: Any) -> list[WarpRows]:
        """This warp's. Q is in shared memory; nobody writes over it before a barrier behind this."""
        c, lane, warp = self.c, cute.arch.lane_idx(), cute.arch.warp_idx()
        found = []
        for atom in range(c.atoms):
            first = (warp * c.atoms + atom) * ATOM
            rO = cute.make_rmem_tensor(cute.make_layout((4, c.dim_v // 8)), Float32)
            row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
            rO.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            query = sQ + (first + lane % 16) * c.pitches[0] + lane // 16 * 16
            steps = c.dim // 16 // self.elements.blocks if c.query_in_registers else 0
            rQ = [self.elements.queries(op.ldmatrix_x4(query + k * 32)) for k in range(steps)]
            found.append(WarpRows(first + lane // 4, lane, rO, row_max, row_sum, scalars, query, rQ))
        return found

    def block(self, rows: list[WarpRows], masks: list[Any], stage: Int32, block: Int32, *, edge: bool) -> None:
        """A block of keys: scores, probabilities, and their product with its values. ``edge``: some may be masked."""
        c = self.c
        scores = self._scores(rows, stage)
        for w, mask, rS in zip(rows, masks, scores, strict=True):
            if edge:
                mask.apply(rS, block, "both")
            elif c.softcap:
                softmax.cap(rS, w.scalars.cap_slope)
            self._online(w, rS)
        self._add_values(rows, scores, stage + c.tile_n * c.pitches[0])

    @cute.jit
    def _online(self, w: WarpRows, rS: cute.Tensor):
        """Scores to probabilities in place, and the output so far brought up to date.

        Numbers are relative to a maximum that may be a little less than the row's: it is kept while no score is more
        than ``_SLACK`` powers of two above it, and a warp all of whose rows keep theirs has nothing to rescale.
        """
        c, scale = self.c, w.scalars.scale_log2
        if const_expr(not c.normalize):  # numerators are relative to the maximum itself
            softmax.rescale(w.rO, softmax.online(rS, w.row_max, w.row_sum, scale, first=False, exact=True))
        else:
            grown, tops = [], []
            for r in cutlass.range_constexpr(2):
                top = cute.arch.fmax(softmax.peak(rS, r), w.row_max[r])
                tops.append(top)
                grown.append((top - w.row_max[r]) * scale > _SLACK)
            if cute.arch.vote_any_sync(grown[0] | grown[1]):
                by = []
                for r in cutlass.range_constexpr(2):
                    by.append(exp2((w.row_max[r] - finite(tops[r])) * scale))
                    w.row_max[r] = tops[r]
                    w.row_sum[r] = w.row_sum[r] * by[r]
                softmax.rescale(w.rO, by)
            for r in cutlass.range_constexpr(2):
                offset = -(finite(w.row_max[r]) * scale)
                sums = [None, None]
                for n, i in enumerate(i for i in range(cute.size(rS)) if i // 2 % 2 == r):
                    rS[i] = exp2(op.fma(rS[i], scale, offset))
                    sums[n % 2] = rS[i] if sums[n % 2] is None else sums[n % 2] + rS[i]
                w.row_sum[r] = w.row_sum[r] + (sums[0] + sums[1])

    def _scores(self, rows: list[WarpRows], sK: Int32) -> list[cute.Tensor]:
        """Q K' of this warp's rows, of each 16 (4, N / 8)."""
        c, lane = self.c, cute.arch.lane_idx()
        found = [cute.make_rmem_tensor(cute.make_layout((4, c.tile_n // 8)), Float32) for _ in rows]
        for rS in found:
            rS.fill(0.0)
        # Or addresses of all of Q's columns would be kept in registers.
        addresses = [w.query if c.query_in_registers else op.fresh(w.query) for w in rows]
        at = sK + (lane // 16 * 8 + lane % 8) * c.pitches[0] + lane // 8 % 2 * 16
        for k in range(c.dim // 16 // self.elements.blocks):
            queries = [
                w.rQ[k] if c.query_in_registers else self.elements.queries(op.ldmatrix_x4(sQ + k * 32))
                for w, sQ in zip(rows, addresses, strict=True)
            ]
            for n in range(c.tile_n // 16):
                keys = self.elements.keys(op.ldmatrix_x4(at + n * 16 * c.pitches[0] + k * 32))
                for rQ, rS in zip(queries, found, strict=True):
                    for a, b in zip(rQ, keys, strict=True):
                        self._multiply(a, b, rS, n)
        return found

    def _add_values(self, rows: list[WarpRows], scores: list[cute.Tensor], sV: Int32) -> None:
        c, lane = self.c, cute.arch.lane_idx()
        at = sV + lane % 16 * c.pitches[1] + lane // 16 * 16
        for k in range(c.tile_n // 16):
            weights = [
                [
                    op.pack(self.elements.dtype, rS[2 * r, 2 * k + m], rS[2 * r + 1, 2 * k + m])
                    for m in range(2)
                    for r in range(2)
                ]
                for rS in scores
            ]
            for n in range(c.dim_v // 16 // self.elements.blocks):
                values = self.elements.values(op.ldmatrix_x4(at + k * 16 * c.pitches[1] + n * 32, transposed=True))
                for rP, w in zip(weights, rows, strict=True):
                    for i, rV in enumerate(values):
                        self._multiply(rP, rV, w.rO, n * self.elements.blocks + i)

    def _multiply(self, a: Any, b: Any, acc: cute.Tensor, n: int) -> None:
        """16 rows times 16 columns of a product, the n-th of ``acc``."""
        for half in range(2):
            old = [acc[i, 2 * n + half] for i in range(4)]
            new = op.mma_m16n8k16(self.elements.dtype, a, b[2 * half : 2 * half + 2], old)
            for i in range(4):
                acc[i, 2 * n + half] = new[i]
