"""From O in registers to results, or to a split in the workspace, which the last CTA of a work tile to arrive adds up.

one CTA a work tile   row sums of all warps, sink, normalised -> 16-bit results, LSE
several               numerators, row_max and row_sum -> workspace; barrier, count (acq_rel add); the last combines
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.partials import join
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90.softmax import transpose_quads

from ..arguments import Scalars, Tensors
from ..epilogue import DenseStore, factor_of
from ..token_keys import WorkTile
from .config import IN_FLIGHT, VECTOR, Config
from .mainloop import Fragments, Mainloop

_INF = float("inf")
_GROUP = 8  # columns of an MMA
_QUAD = 4  # lanes that have a row's columns of a group


class Epilogue(Fixed):
    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop, self.output = config, mainloop, DenseStore(config.dtype)

    @cute.jit
    def store(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, w: Fragments, shared: Int32):
        """The results of a work tile whose keys were all this CTA's."""
        c, lane = self.c, w.lane
        results, row_sum = self.mainloop.by_head(c.shared.results, shared), self.mainloop.total(w)
        if w.part == 0:
            head = tile.head + cutlass.min(w.row, tile.heads - 1)
            results[w.row] = factor_of(tensors, scalars, head, w.row_max[0], row_sum)
            if w.row < tile.heads:
                self.output.store_stats(tensors, scalars, tile.token, head, w.row_max[0], row_sum)
        cute.arch.barrier()
        first = cute.arch.warp_idx() * c.columns + lane % _QUAD * _GROUP
        factors = self.mainloop.of_rows(w, results)
        for (m, r, row), factor in zip(self.mainloop.rows(w), factors, strict=True):
            to = self.output.address(tensors, tile.token, tile.head + row, first)
            for g in cutlass.range_constexpr(0, c.columns // _GROUP, _QUAD):
                pairs = [[w.rO[2 * r + x, m, g + i] * factor for x in range(2)] for i in range(_QUAD)]
                words = transpose_quads([op.pack(c.dtype, *pair) for pair in pairs], lane % _QUAD)
                if row < tile.heads:
                    copies.store_words(to + g * (2 * _GROUP), words)

    @cute.jit
    def store_split(self, split: Int64, tile: WorkTile, w: Fragments):
        """Numerators and statistics at ``split`` of the workspace."""
        c, row_sum = self.c, self.mainloop.total(w)
        if (w.part == 0) & (w.row < tile.heads):
            # ``join`` skips splits whose maximum is -inf; a row of NaN must not be skipped.
            known = cutlass.select_(row_sum == row_sum, w.row_max[0], row_sum)
            memory_ops.store_2_floats(split + c.split.stat_at(w.row), [known, row_sum])
        first = cute.arch.warp_idx() * c.columns + w.lane % _QUAD * 2
        for m, r, row in self.mainloop.rows(w):
            if row < tile.heads:
                to = split + c.split.output_at(row, first)
                for g in cutlass.range_constexpr(c.columns // _GROUP):
                    memory_ops.store_2_floats(to + g * (4 * _GROUP), [w.rO[2 * r + x, m, g] for x in range(2)])

    @cute.jit
    def is_last(self, tensors: Tensors, scalars: Scalars, index: Int32, shared: Int32):
        """Whether this CTA is the last to arrive of work tile ``index``'s; its split is stored."""
        at = cute.make_ptr(Int32, self.c.shared.flag.at(shared), cute.AddressSpace.smem, assumed_align=4)
        sFlag = cute.make_tensor(at, cute.make_layout(1))
        cute.arch.barrier()  # all threads' stores before the release by the atomic
        if cute.arch.thread_idx()[0] == 0:
            arrived = op.add_acq_rel(tensors.count.iterator.toint() + Int64(index) * 4, Int32(1))
            last = arrived == scalars.groups - 1
            if last:
                tensors.count[index] = Int32(0)
            sFlag[0] = cutlass.select_(last, Int32(1), Int32(0))
        cute.arch.barrier()
        return sFlag[0] != 0

    @cute.jit
    def combine(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, splits: Int64):
        """The results of a work tile from its splits, the first of which is at ``splits``."""
        c = self.c
        vectors = const_expr(c.dim // VECTOR)
        for index in cutlass.range(cute.arch.thread_idx()[0], tile.heads * vectors, c.threads, unroll=1):
            row, column = index // vectors, index % vectors * VECTOR
            parts, row_max, row_sum = self._sum(scalars, splits, row, column)
            head = tile.head + row
            factor = factor_of(tensors, scalars, head, row_max, row_sum)
            values = [part[x] * factor for part in parts for x in range(4)]
            words = [op.pack(c.dtype, *values[x : x + 2]) for x in range(0, VECTOR, 2)]
            copies.store_words(self.output.address(tensors, tile.token, head, column), words)
            if column == 0:
                self.output.store_stats(tensors, scalars, tile.token, head, row_max, row_sum)

    @cute.jit
    def _sum(self, scalars: Scalars, splits: Int64, row: Int32, column: Int32):
        """Numerators of 8 columns of a row over all splits, as two vectors of 4; row_max and row_sum."""
        c = self.c
        parts = [cute.make_rmem_tensor(4, Float32) for _ in range(VECTOR // 4)]
        for part in parts:
            part.fill(0.0)
        row_max, row_sum = Float32(-_INF), Float32(0.0)
        for n in cutlass.range(0, scalars.groups, IN_FLIGHT, unroll=1):
            counts = [n + i < scalars.groups for i in range(IN_FLIGHT)]
            at = [splits + Int64(cutlass.min(n + i, scalars.groups - 1)) * c.split.nbytes for i in range(IN_FLIGHT)]
            stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
            news: list[list[Any]] = [
                [
                    memory_ops.load_4_floats_if(a + c.split.output_at(row, column + 4 * x), Int32(valid))
                    for a, valid in zip(at, counts, strict=True)
                ]
                for x in range(len(parts))
            ]
            maxima = [cutlass.select_(valid, s[0], Float32(-_INF)) for valid, s in zip(counts, stats, strict=True)]
            old_max, old_sum = row_max, row_sum
            for part, new in zip(parts, news, strict=True):
                row_max, row_sum = join(part, old_max, old_sum, maxima, [s[1] for s in stats], new)
        return parts, row_max, row_sum
