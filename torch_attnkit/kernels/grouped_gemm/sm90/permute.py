"""Rows of tokens in the order of experts, their numbers in that of ``rows.py``, as TMA brings them to ``wgmma``. What
is beyond a row's end is zero. Where products are of quantised numbers, they are rounded on the way. Imports cutlass.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies

from .arguments import Flags, Matrices, Scalars, Tensors
from .config import SPAN
from .routing import THREADS, SortTogether
from .rows import EACH, operands

_QUADS = 8  # of a warp, each with a span of a token
_ROUNDING_THREADS = 256  # which then have registers enough


class Rows(NamedTuple):
    """Rows of whole spans, in the order of experts."""

    x: cute.Tensor  # (slots, spans of N)
    h: cute.Tensor  # (slots, spans of M); ``Tensors.h`` itself, unless h has yet to be rounded


class Spans:
    """What a quad of lanes does with 128 numbers. ``rounded``: 32 float32 numbers of a row, and a global scale, to what
    they are multiplied as; ``parts``: numbers of bf16 that each of them is the sum of."""

    def __init__(self, rounded: Any, parts: int = 1):
        self.rounded, self.parts = rounded, parts

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
        if inside & (at < Int32(source.shape[1])):
            copies.load(source.iterator + (Int64(row) * source.stride[0] + at), rV)
        if const_expr(self.rounded is not None):
            rX = cute.make_rmem_tensor(EACH, Float32)
            rX.store(rV.load().to(Float32))
            self.rounded(rX, global_scale)
            rV = rX
        return [self._turned(words, quarter) for words in operands(rV, self.parts)]

    def _turned(self, words: list[Any], quarter: Int32) -> list[list[Int32]]:
        """Of a quad's words (w, q), of which each lane has all, those of a lane's q from all lanes, by w."""
        turned = []
        for w in range(4):
            line = [Int32(x) for x in words[4 * w : 4 * w + 4]]
            for step in (1, 2):
                upper = (quarter & step) != 0
                for i in (0, 3 - step):
                    low, high = line[i], line[i + step]
                    other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), step)
                    line[i] = cutlass.select_(upper, other, low)
                    line[i + step] = cutlass.select_(upper, high, other)
            turned.append(line)
        return turned

    def store(self, target: cute.Tensor, words: list[list[Int32]], place: Int32, column: Int32, quarter: Int32) -> None:
        at = target.iterator.toint() + (Int64(place) * target.stride[0] + column) * 2 + quarter * 16
        for w in range(4):
            copies.store_words(at + 64 * w, words[w])

    @cute.jit
    def store_for_experts(
        self, tensors: Tensors, target: cute.Tensor, words: list[list[Int32]], token: Int32, column: Int32,
        quarter: Int32, place_of: cutlass.Constexpr,
    ):  # fmt: skip
        """Into the rows of all places of a token, by slot."""
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            place = place_of(token * top_k + k)
            if place >= 0:
                self.store(target, words, place, column, quarter)


class SortAndPermute:
    """x as it is. When all blocks have sorted, each has a share of the tokens: every token's row is read once and
    written for each of its experts."""

    def __init__(self, sort: SortTogether):
        self.sort, self.spans = sort, Spans(None)

    @cute.jit
    def launch(self, tensors: Tensors, rows: Rows, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, rows).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, rows: Rows):
        sFirst = self.sort.run(tensors, cutlass.memory.SmemAllocator())
        self._permute(tensors, rows, sFirst)
        self.sort.end(tensors)

    @cute.jit
    def _permute(self, tensors: Tensors, rows: Rows, sFirst: cute.Tensor):
        """Spans of tokens, neighbours by neighbouring quads; behind a token's last may come that of its h, zeros of
        which the first product leaves some."""
        quarter = cute.arch.lane_idx() % 4
        spans, h_columns = Int32(rows.x.shape[1]) // SPAN, Int32(rows.h.shape[1])
        each = spans + cutlass.select_(h_columns != Int32(tensors.down.codes.shape[2]) * 2, Int32(1), Int32(0))
        units = Int32(tensors.x.shape[0]) * each
        place = partial(self.sort.place, tensors, sFirst)
        first, step = share_of_quads(THREADS)
        for start in cutlass.range(first, units, step, unroll=1):
            unit = start + cute.arch.lane_idx() // 4
            token, span = unit // each, unit % each
            (words,) = self.spans.words(tensors.x, token, span * SPAN, unit < units, Float32(1.0), quarter)
            if unit < units:
                if span < spans:
                    self.spans.store_for_experts(tensors, rows.x, words, token, span * SPAN, quarter, place)
                else:
                    self.spans.store_for_experts(tensors, rows.h, words, token, h_columns - SPAN, quarter, place)


class Round:
    """Rows to what their codes would stand for: those of x, which a sort has found places for, or those of h."""

    def __init__(self, rounded: Any, by_token: bool):
        self.spans, self.by_token = Spans(rounded), by_token

    @cute.jit
    def launch(
        self, tensors: Tensors, flags: Flags, weights: Matrices, source: cute.Tensor, target: cute.Tensor,
        blocks: Int32, stream: Any,
    ):  # fmt: skip
        self.kernel(tensors, flags, weights, source, target).launch(
            grid=[blocks * (THREADS // _ROUNDING_THREADS), 1, 1], block=[_ROUNDING_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, flags: Flags, weights: Matrices, source: cute.Tensor, target: cute.Tensor):
        quarter = cute.arch.lane_idx() % 4
        spans = Int32(target.shape[1]) // SPAN
        units = Int32(source.shape[0]) * spans
        global_scale = Float32(1.0)
        if flags.activation != 0:
            global_scale = weights.activation[0]
        first, step = share_of_quads(_ROUNDING_THREADS)
        for start in cutlass.range(first, units, step, unroll=1):
            unit = start + cute.arch.lane_idx() // 4
            row, column = unit // spans, unit % spans * SPAN
            (words,) = self.spans.words(source, row, column, unit < units, global_scale, quarter)
            if unit < units:
                if const_expr(self.by_token):
                    place = lambda slot: tensors.order[slot]  # noqa: E731
                    self.spans.store_for_experts(tensors, target, words, row, column, quarter, place)
                else:
                    self.spans.store(target, words, row, column, quarter)


def share_of_quads(threads: int, spared: int = 0) -> tuple[Int32, Int32]:
    """The first of a warp's quads, and how many there are of all warps; the first ``spared`` blocks have none."""
    block, blocks, warps = cute.arch.block_idx()[0] - spared, cute.arch.grid_dim()[0] - spared, threads // 32
    return (block * warps + cute.arch.warp_idx()) * _QUADS, blocks * warps * _QUADS


class SortAndRound:
    """x rounded, after the sort."""

    def __init__(self, sort: SortTogether, rounded: Any):
        self.sort, self.round = sort, Round(rounded, by_token=True)

    @cute.jit
    def launch(self, tensors: Tensors, rows: Rows, scalars: Scalars, blocks: Int32, stream: Any):
        self.sort.launch(tensors, blocks, stream)
        self.round.launch(tensors, scalars.up, tensors.up, tensors.x, rows.x, blocks, stream)
