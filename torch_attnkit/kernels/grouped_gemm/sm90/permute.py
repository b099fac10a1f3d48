"""Rows of tokens in the order of experts, their numbers in that of ``rows.py``, as TMA brings them to ``wgmma``. What
is beyond a row's end is zero. Where products are of quantised numbers, they are rounded on the way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies

from .arguments import Scalars, Tensors, global_scale_of
from .config import SPAN
from .routing import SortTogether
from .rows import EACH, operands

_QUADS = 8  # of a warp, each with a span of a token
_THREADS = 1024
_ROUNDING_THREADS = 256  # which then have registers enough


class Spans:
    """What a quad of lanes does with 128 numbers. ``rounded``: 32 float32 numbers of a row, and a global scale, to what
    they are multiplied as; ``parts``: numbers of bf16 that each of them is the sum of; ``vector``: numbers of a row of
    which all or none are there."""

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
        return [self.turned(words, quarter) for words in operands(rV, self.parts)]

    def turned(self, words: list[Any], quarter: Int32) -> list[list[Int32]]:
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


class SortAndPermute:
    """When all blocks have sorted, each has a share of the tokens: every token's row is read once, ``rounded`` if
    products are of quantised numbers, and written for each of its experts."""

    def __init__(self, columns: int, experts: int, rounded: Any, vector: int):
        self.threads = _THREADS if rounded is None else _ROUNDING_THREADS
        self.sort, self.spans = SortTogether(columns, experts, self.threads), Spans(rounded, vector)

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
        which the first product leaves some."""
        quarter = cute.arch.lane_idx() % 4
        spans, h_columns = Int32(x.shape[1]) // SPAN, Int32(tensors.h.shape[1])
        each = spans + cutlass.select_(h_columns != Int32(tensors.down.codes.shape[2]) * 2, Int32(1), Int32(0))
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
        """Into the rows of all places of a token."""
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            place = self.sort.place(tensors, sFirst, token * top_k + k)
            if place >= 0:
                self.spans.store(target, words, place, column, quarter)


def share_of_quads(threads: int, spared: int = 0) -> tuple[Int32, Int32]:
    """The first of a warp's quads, and how many there are of all warps; the first ``spared`` blocks have none."""
    block, blocks, warps = cute.arch.block_idx()[0] - spared, cute.arch.grid_dim()[0] - spared, threads // 32
    return (block * warps + cute.arch.warp_idx()) * _QUADS, blocks * warps * _QUADS
