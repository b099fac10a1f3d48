"""First launch on Hopper: slots sorted by expert, and rows of activations in the K order of permute_k.py.

For ``wgmma`` rows are sorted by expert, so that TMA loads a tile's tokens as one box; for ``mma.sync`` they keep their
order. Columns behind a row's end are zero. Where activations are quantised, they are rounded on the way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, pdl

from ..arguments import Scalars, Tensors, chosen, global_scale_of
from ..permute_k import EACH, operands
from ..problem import SPAN
from ..work_tiles import Sort, SortByGrid
from .config import Config

_QUADS = 8  # of a warp, each with a span of a token
_THREADS = 1024
_ROUNDING_THREADS = 256  # which then have registers enough


class Spans:
    """A quad of lanes with 128 elements. ``rounded``: fake quantisation of 32 float32 elements of a row by a global
    scale; ``parts``: bf16 addends of each; ``vector``: elements of a row that are all inside or all outside."""

    def __init__(self, rounded: Any, vector: int, parts: int = 1):
        self.rounded, self.vector, self.parts = rounded, min(vector, EACH), parts

    @cute.jit
    def words(
        self, source: cute.Tensor, row: Int32, column: Int32, inside: cutlass.Boolean, global_scale: Float32,
        quarter: Int32,
    ):  # fmt: skip
        """A lane's part of the permuted span from ``column`` on: 16 bytes of every 64, of the first part and of the
        second. Zeros unless ``inside``."""
        at = column + quarter * EACH
        rV = cute.make_rmem_tensor(EACH, source.element_type)
        rV.fill(0)
        for first in cutlass.range_constexpr(0, EACH, self.vector):
            if inside & (at + first < Int32(source.shape[1])):
                some = cute.make_tensor(rV.iterator + first, cute.make_layout(self.vector))
                copies.load(source.iterator + (Int64(row) * source.stride[0] + at + first), some)
        if const_expr(self.rounded is not None):
            rX = cute.make_rmem_tensor(EACH, Float32)
            rX.store(rV.load().to(Float32))
            self.rounded(rX, global_scale)
            rV = rX
        return [self.transpose_quad(words, quarter) for words in operands(rV, self.parts)]

    def transpose_quad(self, words: list[Any], quarter: Int32) -> list[list[Int32]]:
        """4 x 4 transpose over a quad: from words (w, q) that every lane has to those of this lane's q."""
        transpose_quad = []
        for w in range(4):
            line = [Int32(x) for x in words[4 * w : 4 * w + 4]]
            for step in (1, 2):
                upper = (quarter & step) != 0
                for i in (0, 3 - step):
                    low, high = line[i], line[i + step]
                    other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), step)
                    line[i] = cutlass.select_(upper, other, low)
                    line[i + step] = cutlass.select_(upper, high, other)
            transpose_quad.append(line)
        return transpose_quad

    def store(self, target: cute.Tensor, words: list[list[Int32]], dest: Int32, column: Int32, quarter: Int32) -> None:
        at = target.iterator.toint() + (Int64(dest) * target.stride[0] + column) * 2 + quarter * 16
        for w in range(4):
            copies.store_words(at + 64 * w, words[w])


class SortAndPermute:
    """When all CTAs have sorted, each has a share of the tokens: a token's row is read once, ``rounded`` if activations
    are quantised, and written for each of its experts."""

    def __init__(self, columns: int, experts: int, rounded: Any, vector: int):
        self.threads = _THREADS if rounded is None else _ROUNDING_THREADS
        self.sort, self.spans = SortByGrid(columns, experts, self.threads), Spans(rounded, vector)

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        """``x``: rows of whole spans in the order of experts, (slots, spans of N), to be written; ``blocks``: with
        ``_THREADS`` each."""
        self.kernel(tensors, x, scalars).launch(
            grid=[blocks * (_THREADS // self.threads), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        sFirst = self.sort.run(tensors, cutlass.memory.SmemAllocator())
        self._permute(tensors, x, scalars, sFirst)
        self.sort.end(tensors)

    @cute.jit
    def _permute(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor):
        """Spans of tokens, neighbours by neighbouring quads; behind a token's last may come that of its h, zeros of
        which the first GEMM leaves some."""
        quarter = cute.arch.lane_idx() % 4
        spans, h_columns = Int32(x.shape[1]) // SPAN, Int32(tensors.h.shape[1])
        each = spans + cutlass.select_(h_columns != Int32(tensors.down.packed.shape[2]) * 2, Int32(1), Int32(0))
        units = Int32(tensors.x.shape[0]) * each
        global_scale = global_scale_of(scalars.up, tensors.up)
        first, step = share_of_quads(self.threads)
        for start in cutlass.range(first, units, step, unroll=1):
            unit = start + cute.arch.lane_idx() // 4
            token, span = unit // each, unit % each
            (words,) = self.spans.words(tensors.x, token, span * SPAN, unit < units, global_scale, quarter)
            if unit < units:
                if span < spans:
                    self._store(tensors, x, words, token, span * SPAN, quarter, sFirst)
                else:
                    self._store(tensors, tensors.h, words, token, h_columns - SPAN, quarter, sFirst)

    @cute.jit
    def _store(
        self, tensors: Tensors, target: cute.Tensor, words: list[list[Int32]], token: Int32, column: Int32,
        quarter: Int32, sFirst: cute.Tensor,
    ):  # fmt: skip
        """Into all rows of a token."""
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            dest = self.sort.dest_row(tensors, sFirst, token * top_k + k)
            if dest >= 0:
                self.spans.store(target, words, dest, column, quarter)


def share_of_quads(threads: int, spared: int = 0) -> tuple[Int32, Int32]:
    """The first of a warp's quads, and how many there are of all warps; the first ``spared`` blocks have none."""
    block, blocks, warps = cute.arch.block_idx()[0] - spared, cute.arch.grid_dim()[0] - spared, threads // 32
    return (block * warps + cute.arch.warp_idx()) * _QUADS, blocks * warps * _QUADS


_PREPARE_THREADS = 256  # which have registers enough to round


class PrepareTokens:
    def __init__(self, up: Config, down: Config, experts: int, rounded: Any, by_warp: bool):
        self.sort = None if by_warp else Sort(up.columns, experts, threads=_PREPARE_THREADS)
        self.sorters = 0 if by_warp else 1  # blocks
        self.spans, self.parts, self.rounded = Spans(rounded, up.token_vector, up.parts), up.parts, rounded

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, x, scalars).launch(grid=[blocks, 1, 1], block=[_PREPARE_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        pdl.launch_dependents()
        if cute.arch.block_idx()[0] < self.sorters:
            self._sort(tensors)
        else:
            self._rows(tensors, x, scalars)
            self._zeros(tensors)

    def _sort(self, tensors: Tensors) -> None:
        if self.sort is not None:
            self.sort.run(tensors, cutlass.memory.SmemAllocator())

    @cute.jit
    def _rows(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        quarter = cute.arch.lane_idx() % 4
        global_scale = global_scale_of(scalars.up, tensors.up)
        spans = Int32(x.shape[1]) // SPAN
        units = Int32(tensors.x.shape[0]) * spans
        first, step = share_of_quads(_PREPARE_THREADS, spared=self.sorters)
        for start in cutlass.range(first, units, step, unroll=1):
            unit = start + cute.arch.lane_idx() // 4
            token, column = unit // spans, unit % spans * SPAN
            parts = self.spans.words(tensors.x, token, column, unit < units, global_scale, quarter)
            if unit < units:
                for part in cutlass.range_constexpr(self.parts):
                    self.spans.store(x, parts[part], token * self.parts + part, column, quarter)

    @cute.jit
    def _zeros(self, tensors: Tensors):
        """A warp has a row at a time."""
        lane = cute.arch.lane_idx()
        tokens, top_k = Int32(tensors.indices.shape[0]), Int32(tensors.indices.shape[1])
        block, blocks = cute.arch.block_idx()[0] - self.sorters, cute.arch.grid_dim()[0] - self.sorters
        warps = const_expr(_PREPARE_THREADS // 32)
        first, step = block * warps + cute.arch.warp_idx(), blocks * warps
        features, columns = Int32(tensors.down.packed.shape[2]) * 2, Int32(tensors.h.shape[1])
        begin = features // SPAN * SPAN
        if features < columns:
            for row in cutlass.range(first, Int32(tensors.h.shape[0]), step, unroll=1):
                for i in cutlass.range(begin + lane, columns, 32, unroll=1):
                    tensors.h[row, i] = cutlass.BFloat16(0.0)
        for i in cutlass.range(first * 32 + lane, tokens * top_k, step * 32, unroll=1):
            tensors.order[tokens * top_k + i] = Int32(0)
        for t in cutlass.range(first, tokens, step, unroll=1):
            some = Int32(0)
            for k in cutlass.range(lane, top_k, 32, unroll=1):
                some += cutlass.select_(chosen(tensors, t, k) >= 0, Int32(1), Int32(0))
            if cute.arch.warp_redux_sync(some, "add") == 0:
                for i in cutlass.range(lane, Int32(tensors.out.shape[1]), 32, unroll=1):
                    tensors.out[t, i] = tensors.out.element_type(0.0)
