"""The first launch: slots sorted by expert, work tiles, and rows of x as the GEMMs read them, one for each slot.

Every CTA counts slots in device memory; when all are counted (``SortByGrid``), each takes its share of x: a thread
reads 32 elements of a token once, quantises or reorders them, and writes them for each of the token's experts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import copies

from ..arguments import Scalars, Tensors, global_scale_of
from ..permute_k import operands
from ..quantize_act import FAKE_QUANTIZE
from ..work_tiles import SortByGrid
from .config import BITS, TOKEN_BLOCK, TOKENS, QuantizedRow
from .swiglu_quantize import Quantized, quantize
from .topk_reduce import TokenTags

_THREADS = 256  # which have registers enough to quantise
_UNIT = 32  # elements of a row that a thread has
_IN_FLIGHT = 8  # of one load


class _SortAndWrite:
    """``tokens``: of a work tile; ``result_rows``: features of a work tile of the second GEMM."""

    def __init__(self, activations: str, experts: int, result_rows: int, tokens: int):
        self.activations = activations
        self.sort = SortByGrid(tokens, experts, _THREADS)
        self.tags = TokenTags(result_rows, self.sort)

    @cute.jit
    def launch(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, blocks: Int32, stream: Any):
        self.kernel(tensors, x, scalars).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars):
        sFirst = self.sort.run(tensors, cutlass.memory.SmemAllocator())
        self.tags.write(tensors, sFirst)
        self.write(tensors, x, scalars, sFirst)
        self.sort.end(tensors)

    def write(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor) -> None:
        """This CTA's share of x."""
        raise NotImplementedError

    def load(self, tensors: Tensors, token: Int32, column: Int32, rV: cute.Tensor) -> None:
        for i in range(0, _UNIT, _IN_FLIGHT):
            some = cute.make_tensor(rV.iterator + i, cute.make_layout(_IN_FLIGHT))
            copies.load(tensors.x.iterator + (Int64(token) * tensors.x.stride[0] + column + i), some)


class SortAndQuantize(_SortAndWrite):
    """Block-scaled rows, as ``QuantizedRow`` has them. ``even_first``: of every 32 elements those at even places come
    before the others."""

    def __init__(self, activations: str, experts: int, result_rows: int, tokens: int, even_first: bool = False):
        super().__init__(activations, experts, result_rows, tokens)
        self.even_first = even_first

    @cute.jit
    def write(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor):
        """Units of a token by neighbouring threads. Behind a row's last element come zeros up to a whole MMA."""
        tokens, columns = Int32(tensors.x.shape[0]), Int32(tensors.x.shape[1])
        nbytes = QuantizedRow(columns, self.activations).code_bytes
        each = nbytes * 8 // (BITS[self.activations] * _UNIT)
        global_scale = global_scale_of(scalars.up, tensors.up)
        first = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        for unit in cutlass.range(first, tokens * each, cute.arch.grid_dim()[0] * _THREADS, unroll=1):
            token, column = unit // each, unit % each * _UNIT
            rV = cute.make_rmem_tensor(_UNIT, tensors.x.element_type)
            rV.fill(0)
            if column < columns:
                self.load(tensors, token, column, rV)
            rX = rV.load().to(Float32)
            order = [*range(0, _UNIT, 2), *range(1, _UNIT, 2)] if self.even_first else range(_UNIT)
            result = quantize(self.activations, [rX[i] for i in order], global_scale)
            dest = self._store(tensors, x, result, token, column, nbytes, sFirst)
            if (dest < 0) & (column < columns):
                self.tags.clear(tensors, token, column, _UNIT)

    @cute.jit
    def _store(
        self, tensors: Tensors, x: cute.Tensor, result: Quantized, token: Int32, column: Int32, code_bytes: Int32,
        sFirst: cute.Tensor,
    ):  # fmt: skip
        """Into a token's rows. Returns one of them, -1 if there is none."""
        any_dest, block, bits = Int32(-1), const_expr(TOKEN_BLOCK[self.activations]), const_expr(BITS[self.activations])
        top_k = Int32(tensors.indices.shape[1])
        for k in cutlass.range(top_k, unroll=1):
            dest = self.sort.dest_row(tensors, sFirst, token * top_k + k)
            if dest >= 0:
                any_dest = dest
                row = x.iterator.toint() + Int64(dest) * x.stride[0] * 2
                for i in cutlass.range_constexpr(0, len(result.packed), 4):
                    copies.store_words(row + column * bits // 8 + 4 * i, result.packed[i : i + 4])
                for i in cutlass.range_constexpr(_UNIT // block):
                    at = cute.make_ptr(Uint8, row + code_bytes + column // block + i, cute.AddressSpace.gmem)
                    cute.make_tensor(at, cute.make_layout(1))[0] = Uint8(result.scales[i])
        return any_dest


class SortAndPermute(_SortAndWrite):
    """bf16 rows for weights that are dequantised: of every 8 elements i and i + 4 are neighbours, as packed weights are
    decoded. Where activations are quantised, each is rounded to what its code stands for."""

    def __init__(self, activations: str, experts: int, result_rows: int, parts: int):
        super().__init__(activations, experts, result_rows, TOKENS)
        self.rounded, self.parts = FAKE_QUANTIZE[activations], parts

    @cute.jit
    def write(self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sFirst: cute.Tensor):
        tokens, each = Int32(tensors.x.shape[0]), Int32(tensors.x.shape[1]) // _UNIT
        top_k = Int32(tensors.indices.shape[1])
        global_scale = global_scale_of(scalars.up, tensors.up)
        first = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        for unit in cutlass.range(first, tokens * each, cute.arch.grid_dim()[0] * _THREADS, unroll=1):
            token, column = unit // each, unit % each * _UNIT
            rV = cute.make_rmem_tensor(_UNIT, tensors.x.element_type)
            self.load(tensors, token, column, rV)
            if const_expr(self.rounded is not None):
                rX = cute.make_rmem_tensor(_UNIT, Float32)
                rX.store(rV.load().to(Float32))
                self.rounded(rX, global_scale)
                rV = rX
            parts, any_dest = operands(rV, self.parts), Int32(-1)
            for k in cutlass.range(top_k, unroll=1):
                dest = self.sort.dest_row(tensors, sFirst, token * top_k + k)
                if dest >= 0:
                    any_dest = dest
                    row = x.iterator.toint() + (Int64(dest) * x.stride[0] + column) * 2
                    for part in cutlass.range_constexpr(self.parts):
                        at = row + part * Int32(tensors.x.shape[1]) * 2
                        for i in cutlass.range_constexpr(0, _UNIT // 2, 4):
                            copies.store_words(at + 4 * i, [Int32(w) for w in parts[part][i : i + 4]])
            if any_dest < 0:
                self.tags.clear(tensors, token, column, _UNIT)
