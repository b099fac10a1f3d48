"""The first launch where weights are decoded: slots in the order of their experts, work tiles, and x as the products
want it, a row for each slot, of numbers that are rounded where products are of quantised ones."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies

from ..sm90.arguments import Scalars, Tensors, global_scale_of
from ..sm90.rounding import ROUNDED
from ..sm90.routing import SortTogether
from ..sm90.rows import operands
from .config import TOKENS
from .totals import Marks

_THREADS = 256  # which have registers enough to round
_UNIT = 32  # numbers of a row that a thread has
_AT_ONCE = 8  # that one load brings


class SortAndPermute:
    """When all blocks have sorted, each has a share of the tokens: every token's row is read once and written for each
    of its experts. Of every 8 numbers i and i + 4 are neighbours, as codes of weights are decoded."""

    def __init__(self, activations: str, experts: int, parts: int, result_rows: int):
        self.rounded, self.parts = ROUNDED[activations], parts
        self.sort = SortTogether(TOKENS, experts, _THREADS)
        self.marks = Marks(result_rows, self.sort)

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, x, scalars).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        sFirst = self.sort.run(tensors, cutlass.memory.SmemAllocator())
        self.marks.write(tensors, sFirst)
        self._permute(tensors, x, scalars, sFirst)
        self.sort.end(tensors)

    @cute.jit
    def _permute(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor):
        tokens, each = Int32(tensors.x.shape[0]), Int32(tensors.x.shape[1]) // _UNIT
        top_k = Int32(tensors.indices.shape[1])
        global_scale = global_scale_of(scalars.up, tensors.up)
        first = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        for unit in cutlass.range(first, tokens * each, cute.arch.grid_dim()[0] * _THREADS, unroll=1):
            token, column = unit // each, unit % each * _UNIT
            rV = cute.make_rmem_tensor(_UNIT, tensors.x.element_type)
            for i in cutlass.range_constexpr(0, _UNIT, _AT_ONCE):
                some = cute.make_tensor(rV.iterator + i, cute.make_layout(_AT_ONCE))
                copies.load(tensors.x.iterator + (Int64(token) * tensors.x.stride[0] + column + i), some)
            if const_expr(self.rounded is not None):
                rX = cute.make_rmem_tensor(_UNIT, Float32)
                rX.store(rV.load().to(Float32))
                self.rounded(rX, global_scale)
                rV = rX
            parts, home = operands(rV, self.parts), Int32(-1)
            for k in cutlass.range(top_k, unroll=1):
                place = self.sort.place(tensors, sFirst, token * top_k + k)
                if place >= 0:
                    home = place
                    row = x.iterator.toint() + (Int64(place) * x.stride[0] + column) * 2
                    for part in cutlass.range_constexpr(self.parts):
                        at = row + part * Int32(tensors.x.shape[1]) * 2
                        for i in cutlass.range_constexpr(0, _UNIT // 2, 4):
                            copies.store_words(at + 4 * i, [Int32(w) for w in parts[part][i : i + 4]])
            if home < 0:
                self.marks.clear(tensors, token, column, _UNIT)
