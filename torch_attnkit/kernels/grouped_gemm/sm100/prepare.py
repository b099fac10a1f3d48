"""The first launch: slots in the order of their experts, work tiles, and x quantised, a row for each slot. Imports
cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import copies

from ..sm90.arguments import Scalars, Tensors, global_scale_of
from ..sm90.routing import SortTogether
from .config import BITS, TOKEN_BLOCK, Rows
from .quantise import Quantised, quantised
from .totals import Marks

_THREADS = 256  # which have registers enough to quantise
_UNIT = 32  # numbers of a row that a thread has
_AT_ONCE = 8  # that one load brings


class SortAndQuantise:
    """When all blocks have sorted, each has a share of the tokens: every token's row is read once, quantised, and
    written for each of its experts."""

    def __init__(self, activations: str, experts: int, result_rows: int, tokens: int):
        """``tokens``: of a work tile."""
        self.activations = activations
        self.sort = SortTogether(tokens, experts, _THREADS)
        self.marks = Marks(result_rows, self.sort)

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, x, scalars).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        sFirst = self.sort.run(tensors, cutlass.memory.SmemAllocator())
        self.marks.write(tensors, sFirst)
        self._quantise(tensors, x, scalars, sFirst)
        self.sort.end(tensors)

    @cute.jit
    def _quantise(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor):
        """Units of a token by neighbouring threads. Behind a row's last number come zeros up to a whole product."""
        tokens, columns = Int32(tensors.x.shape[0]), Int32(tensors.x.shape[1])
        nbytes = Rows(columns, self.activations).code_bytes
        each = nbytes * 8 // (BITS[self.activations] * _UNIT)
        global_scale = global_scale_of(scalars.up, tensors.up)
        first = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        for unit in cutlass.range(first, tokens * each, cute.arch.grid_dim()[0] * _THREADS, unroll=1):
            token, column = unit // each, unit % each * _UNIT
            rV = cute.make_rmem_tensor(_UNIT, tensors.x.element_type)
            rV.fill(0)
            if column < columns:
                for i in cutlass.range_constexpr(0, _UNIT, _AT_ONCE):
                    some = cute.make_tensor(rV.iterator + i, cute.make_layout(_AT_ONCE))
                    at = Int64(token) * tensors.x.stride[0] + column + i
                    copies.load(tensors.x.iterator + at, some)
            rX = rV.load().to(Float32)
            result = quantised(self.activations, [rX[i] for i in range(_UNIT)], global_scale)
            place = self._store(tensors, x, result, token, column, nbytes, sFirst)
            if (place < 0) & (column < columns):
                self.marks.clear(tensors, token, column, _UNIT)

    @cute.jit
    def _store(
        self, tensors: Tensors, x: cute.Tensor, result: Quantised, token: Int32, column: Int32, code_bytes: Int32,
        sFirst: cute.Tensor,
    ):  # fmt: skip
        """Into the rows of all places of a token. Returns one of them, -1 if there is none."""
        home, block, bits = Int32(-1), const_expr(TOKEN_BLOCK[self.activations]), const_expr(BITS[self.activations])
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            place = self.sort.place(tensors, sFirst, token * top_k + k)
            if place >= 0:
                home = place
                row = x.iterator.toint() + Int64(place) * x.stride[0] * 2
                for i in cutlass.range_constexpr(0, len(result.codes), 4):
                    copies.store_words(row + column * bits // 8 + 4 * i, result.codes[i : i + 4])
                for i in cutlass.range_constexpr(_UNIT // block):
                    at = cute.make_ptr(Uint8, row + code_bytes + column // block + i, cute.AddressSpace.gmem)
                    cute.make_tensor(at, cute.make_layout(1))[0] = Uint8(result.scales[i])
        return home
