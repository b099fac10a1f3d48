"""Rows of x in the order of experts, as TMA brings them to ``wgmma``: sorted and permuted by one launch.

A product's steps over K take the numbers of a row in the order in which a word's codes are decoded: number
``32 c + 8 w + 4 b + q`` of 128 stands at ``32 w + 8 q + 2 c + b``, so that the words that lane c of a quad decodes from
16 bytes of codes meet its part of eight steps (PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16"). What is
beyond a row's end is zero. Imports cutlass.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op

from .arguments import Tensors
from .config import SPAN
from .gather import operands
from .routing import THREADS, Sort

_EACH = 32  # numbers that a lane has of a span
_WARPS = THREADS // 32
_QUADS = 8  # of a warp, each with a span of a token


class Permute:
    """The first block sorts; the others, which are dispatched after it, wait for that. Then each has a share of the
    tokens: every token's row is read once and written for each of its experts."""

    def __init__(self, sort: Sort):
        self.sort = sort

    @cute.jit
    def launch(self, tensors: Tensors, rows: cute.Tensor, blocks: Int32, stream: Any):
        self.kernel(tensors, rows).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, rows: cute.Tensor):
        memory = cutlass.memory.SmemAllocator()
        if cute.arch.block_idx()[0] == 0:
            self.sort.run(tensors, memory)
        self._await_sort(tensors)
        self._rows(tensors, rows)

    @cute.jit
    def _await_sort(self, tensors: Tensors):
        """Every block adds one to the counter, the first of all the one that sorted; the last sets it back."""
        cute.arch.barrier()
        if cute.arch.thread_idx()[0] == 0:
            counter = tensors.count.iterator.toint()
            if cute.arch.block_idx()[0] != 0:
                sorted_ = op.load_acquire(counter)
                while sorted_ == 0:
                    sorted_ = op.load_acquire(counter)
            if op.add_acq_rel(counter, Int32(1)) == cute.arch.grid_dim()[0] - 1:
                tensors.count[0, 0] = Int32(0)
        cute.arch.barrier()

    @cute.jit
    def _rows(self, tensors: Tensors, rows: cute.Tensor):
        """Spans of tokens, neighbours by neighbouring quads; behind a token's last may come that of its h."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + cute.arch.warp_idx()
        columns, spans = Int32(tensors.x.shape[1]), Int32(rows.shape[1]) // SPAN
        h_columns = Int32(tensors.h.shape[1])
        each = spans + cutlass.select_(h_columns != Int32(tensors.down.codes.shape[2]) * 2, Int32(1), Int32(0))
        units = Int32(tensors.x.shape[0]) * each
        for first in cutlass.range(warp * _QUADS, units, cute.arch.grid_dim()[0] * _WARPS * _QUADS, unroll=1):
            unit = first + lane // 4
            token, span = unit // each, unit % each
            at = span * SPAN + lane % 4 * _EACH
            rX = cute.make_rmem_tensor(_EACH, tensors.x.element_type)
            rX.fill(0)
            if (unit < units) & (at < columns):
                copies.load(tensors.x.iterator + (Int64(token) * tensors.x.stride[0] + at), rX)
            words = self._turned(operands(rX, 1)[0], lane % 4)
            if unit < units:
                if span < spans:
                    self._store(tensors, rows, words, token, span * SPAN, lane % 4)
                else:
                    self._store(tensors, tensors.h, words, token, h_columns - SPAN, lane % 4)

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

    @cute.jit
    def _store(
        self, tensors: Tensors, target: cute.Tensor, words: list[list[Int32]], token: Int32, column: Int32,
        quarter: Int32,
    ):  # fmt: skip
        """A span, into the rows of all of a token's places."""
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            place = tensors.order[token * top_k + k]
            if place >= 0:
                at = target.iterator.toint() + (Int64(place) * target.stride[0] + column) * 2 + quarter * 16
                for w in cutlass.range_constexpr(4):
                    copies.store_words(at + 64 * w, words[w])
