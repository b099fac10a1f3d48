"""The first launch for few tokens: work tiles, and rows of x as the products want them.

One block sorts, unless slots are few (``SortByWarp``); the others, meanwhile, write x's rows in the order of
``rows.py``, rounded where products are of quantised numbers, and zeros where h has more columns than features, where a
token has no expert, and where parts of h are counted.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .arguments import Scalars, Tensors, chosen, global_scale_of
from .config import SPAN, Config
from .permute import Spans, share_of_quads
from .routing import Sort

_THREADS = 256  # which have registers enough to round


class Prepare:
    def __init__(self, up: Config, down: Config, experts: int, rounded: Any, by_warp: bool):
        self.sort = None if by_warp else Sort(up.columns, experts, threads=_THREADS)
        self.sorters = 0 if by_warp else 1  # blocks
        self.spans, self.parts, self.rounded = Spans(rounded, up.token_vector, up.parts), up.parts, rounded

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, x, scalars).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        cute.arch.griddepcontrol_launch_dependents()
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
        first, step = share_of_quads(_THREADS, spared=self.sorters)
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
        warps = const_expr(_THREADS // 32)
        first, step = block * warps + cute.arch.warp_idx(), blocks * warps
        features, columns = Int32(tensors.down.codes.shape[2]) * 2, Int32(tensors.h.shape[1])
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
