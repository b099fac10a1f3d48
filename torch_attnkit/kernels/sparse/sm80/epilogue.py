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
from .config import ATOM, Config
from .mainloop import Fragments, Mainloop

_INF = float("inf")
_GROUP = 8  # columns of an MMA, and of 16 bytes of results
_QUAD = 4  # lanes that have a row's columns of a group
_IN_FLIGHT = 4  # splits that a thread has in flight while it combines


class Epilogue(Fixed):
    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop, self.output = config, mainloop, DenseStore(config.dtype)

    @cute.jit
    def row_sums(self, w: Fragments, shared: Int32):
        """Over all keys, in the order of ``row_max``. The row maxima of the last tile have been read."""
        c, stats = self.c, self.mainloop.stats(shared)
        for r in cutlass.range_constexpr(2):
            part = w.row_sum[r]
            for distance in cutlass.range_constexpr(1, 3):
                part += cute.arch.shuffle_sync_bfly(part, distance)
            if w.lane % _QUAD == 0:
                stats[w.heads + w.lane // _QUAD + 8 * r, w.group] = part
        cute.arch.barrier()
        sums = []
        for m in cutlass.range_constexpr(c.head_groups):
            for r in cutlass.range_constexpr(2):
                row = m * ATOM + w.lane // _QUAD + 8 * r
                total = stats[row, 0]
                for n in cutlass.range_constexpr(1, c.key_groups):
                    total += stats[row, n]
                sums.append(total)
        return sums

    def _rows(self, w: Fragments) -> list[tuple[int, int, Int32]]:
        """(head group, which of this lane's two, row) in the order of ``row_max``."""
        lane = w.lane // _QUAD
        return [(m, r, m * ATOM + lane + 8 * r) for m in range(self.c.head_groups) for r in range(2)]

    @cute.jit
    def store(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, w: Fragments, sums: list[Float32]):
        """The results of a work tile whose keys were all this CTA's."""
        c, lane = self.c, w.lane
        first = cute.arch.warp_idx() * c.columns + lane % _QUAD * _GROUP
        for (m, r, row), row_sum in zip(self._rows(w), sums, strict=True):
            head = tile.head + cutlass.min(row, tile.heads - 1)
            factor = factor_of(tensors, scalars, head, w.row_max[r, m], row_sum)
            to = self.output.address(tensors, tile.token, head, first)
            for g in cutlass.range_constexpr(0, c.columns // _GROUP, _QUAD):
                words = [
                    op.pack(c.dtype, w.rO[2 * r, m, g + i] * factor, w.rO[2 * r + 1, m, g + i] * factor)
                    for i in range(_QUAD)
                ]
                words = transpose_quads(words, lane % _QUAD)
                if row < tile.heads:
                    copies.store_words(to + g * (2 * _GROUP), words)
            if (row < tile.heads) & (cute.arch.warp_idx() == 0) & (lane % _QUAD == 0):
                self.output.store_stats(tensors, scalars, tile.token, head, w.row_max[r, m], row_sum)

    @cute.jit
    def store_split(self, split: Int64, tile: WorkTile, w: Fragments, sums: list[Float32]):
        """Numerators and statistics at ``split`` of the workspace."""
        c, lane = self.c, w.lane
        first = cute.arch.warp_idx() * c.columns + lane % _QUAD * 2
        for (m, r, row), row_sum in zip(self._rows(w), sums, strict=True):
            if row < tile.heads:
                to = split + c.split.output_at(row, first)
                for g in cutlass.range_constexpr(c.columns // _GROUP):
                    pair = [w.rO[2 * r + x, m, g] for x in range(2)]
                    memory_ops.store_2_floats(to + g * (4 * _GROUP), pair)
                if (cute.arch.warp_idx() == 0) & (lane % _QUAD == 0):
                    # ``join`` skips splits whose maximum is -inf; a row of NaN must not be skipped.
                    known = cutlass.select_(row_sum == row_sum, w.row_max[r, m], row_sum)
                    memory_ops.store_2_floats(split + c.split.stat_at(row), [known, row_sum])

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
        vectors = const_expr(c.dim // _GROUP)
        for index in cutlass.range(cute.arch.thread_idx()[0], tile.heads * vectors, c.threads, unroll=1):
            row, column = index // vectors, index % vectors * _GROUP
            parts, row_max, row_sum = self._sum(scalars, splits, row, column)
            head = tile.head + row
            factor = factor_of(tensors, scalars, head, row_max, row_sum)
            values = [part[x] * factor for part in parts for x in range(4)]
            words = [op.pack(c.dtype, *values[x : x + 2]) for x in range(0, _GROUP, 2)]
            copies.store_words(self.output.address(tensors, tile.token, head, column), words)
            if column == 0:
                self.output.store_stats(tensors, scalars, tile.token, head, row_max, row_sum)

    @cute.jit
    def _sum(self, scalars: Scalars, splits: Int64, row: Int32, column: Int32):
        """Numerators of 8 columns of a row over all splits, as two vectors of 4; row_max and row_sum."""
        c = self.c
        parts = [cute.make_rmem_tensor(4, Float32) for _ in range(_GROUP // 4)]
        for part in parts:
            part.fill(0.0)
        row_max, row_sum = Float32(-_INF), Float32(0.0)
        for n in cutlass.range(0, scalars.groups, _IN_FLIGHT, unroll=1):
            # Past the end the last split again, with weight 0.
            at = [
                splits + Int64(cutlass.min(n + i, scalars.groups - 1)) * c.split.nbytes for i in range(_IN_FLIGHT)
            ]  # fmt: skip
            stats = [op.load_2_floats(a + c.split.stat_at(row)) for a in at]
            news: list[list[Any]] = [
                [op.load_4_floats(a + c.split.output_at(row, column + 4 * x)) for a in at] for x in range(len(parts))
            ]
            maxima = [
                cutlass.select_(n + i < scalars.groups, stats[i][0], Float32(-_INF)) for i in range(_IN_FLIGHT)
            ]  # fmt: skip
            old_max, old_sum = row_max, row_sum
            for part, new in zip(parts, news, strict=True):
                row_max, row_sum = join(part, old_max, old_sum, maxima, [s[1] for s in stats], new)
        return parts, row_max, row_sum
