"""Epilogues with rows of weights as lanes of tensor memory and tokens as columns (swap-AB), of both GEMM kernels.

Rows of gate and of up are in different lanes: accumulators of 32 tokens at a time are transposed through shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import tmem

from ..arguments import Scalars, Tensors, global_scale_of
from ..permute_k import split
from ..quantize_act import FAKE_QUANTIZE
from ..work_tiles import WorkTile
from .config import (
    BITS,
    CHUNK,
    COLUMN_STEP,
    FEATURES,
    PITCH,
    RESULT_WARPS,
    TOKEN_BLOCK,
    WEIGHT_ROWS,
    DequantConfig,
    QuantizedRow,
)
from .epilogue import StoreEpilogue, sync_epilogue
from .swiglu_quantize import plain, quantize, swiglu


def _completed(some: list[Float32], factor: Float32, bias: Float32 | None) -> list[Float32]:
    """Accumulators of a lane's row times their factor, plus its bias."""
    return [x * factor if bias is None else op.fma(x, factor, bias) for x in some]


class _Transposed(Fixed):
    """Accumulators of ``CHUNK`` tokens in shared memory: written by rows, read by tokens."""

    shared_bytes = CHUNK * PITCH * 4

    def floats(self, address: Int32, count: int) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=min(4 * count, 16))
        return cute.make_tensor(pointer, cute.make_layout(count))

    def gate_and_up(self, address: Int32, count: int) -> list[cute.Tensor]:
        """Of neighbouring features of a token."""
        pair = [cute.make_rmem_tensor(count, Float32) for _ in range(2)]
        for part in range(2):
            cute.autovec_copy(self.floats(address + part * FEATURES * 4, count), pair[part])
        return pair


class SwapAbSwiglu(_Transposed):
    """h = swiglu(gate, up) of a row tile, quantised as ``QuantizedRow`` has rows, a block of a token a thread."""

    def __init__(self, activations: str):
        self.activations = activations
        self.block, self.bits = TOKEN_BLOCK[activations], BITS[activations]

    def plain(self, scalars: Scalars) -> Any:
        """As ``SwigluEpilogue`` has it."""
        return plain(scalars) & (scalars.up.bias == 0)

    def end(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> None:
        """Nothing is left to do."""

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, s: Any, warp: Int32
    ):  # fmt: skip
        """``sums``: the columns of tensor memory, as this warp reaches them."""
        if self.plain(scalars):
            self._chunks(tensors, scalars, tile, factor, sums, s, warp, True)
        else:
            self._chunks(tensors, scalars, tile, factor, sums, s, warp, False)

    @cute.jit
    def _chunks(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, s: Any, warp: Int32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        thread = warp * 32 + cute.arch.lane_idx()
        bias = None if const_expr(simple) else s.sBias[thread]
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            sync_epilogue()  # the last chunk was read
            for i in cutlass.range_constexpr(0, CHUNK, COLUMN_STEP):
                if first + i < tile.columns:
                    some = tmem.load(sums + first + i, COLUMN_STEP)
                    tmem.await_loads()
                    for j, x in enumerate(_completed(some, factor, bias)):
                        self.floats(s.results + ((i + j) * PITCH + thread) * 4, 1)[0] = x
            sync_epilogue()
            self._block(tensors, scalars, tile, first, s.results, thread, simple)

    @cute.jit
    def _block(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, first: Int32, shared: Int32, thread: Int32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        """A block of a token of the chunk a thread."""
        blocks = const_expr(FEATURES // self.block)  # of a token
        token, part = thread // blocks, thread % blocks * self.block
        if (token < CHUNK) & (first + token < tile.columns):
            at = shared + (token * PITCH + part) * 4
            gate, up = self.gate_and_up(at, self.block)
            h = []
            for i in cutlass.range_constexpr(0, self.block, 2):
                h += swiglu(scalars, (gate[i], gate[i + 1]), (up[i], up[i + 1]), simple)
            result = quantize(self.activations, h, global_scale_of(scalars.down, tensors.down))
            features = Int32(tensors.up.packed.shape[1]) >> 1
            row = tensors.h.iterator.toint() + Int64(tile.first + first + token) * tensors.h.stride[0] * 2
            feature = tile.row * FEATURES + part
            self._store(row + (feature * self.bits >> 3), [Uint32(word) for word in result.packed])
            scale = cutlass.select_(feature < features, result.scales[0], Int32(0))
            behind = QuantizedRow(features, self.activations).code_bytes
            self._store(row + behind + Int32(Uint32(feature) // self.block), [Uint8(scale)])

    def _store(self, address: Int64, values: list[Any]) -> None:
        """Neighbours, from a multiple of their size on."""
        kind = type(values[0])
        some = cute.make_rmem_tensor(len(values), kind)
        for i, value in enumerate(values):
            some[i] = value
        align = min(len(values) * kind.width // 8, 16)
        target = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=align)
        cute.autovec_copy(some, cute.make_tensor(target, cute.make_layout(len(values))))


class SwapAbStore(StoreEpilogue):
    """y of a row tile as ``StoreEpilogue`` has it, a token's features by neighbouring lanes; then top-k reduction."""

    def end(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> None:
        sync_epilogue()  # a token's features are those of all warps, and its sums any one's
        self.reduce.run(tensors, scalars, tile, warp)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, s: Any, warp: Int32
    ):  # fmt: skip
        if self.plain(scalars):
            self._store(tensors, tile, factor, sums, s, warp, True)
        else:
            self._store(tensors, tile, factor, sums, s, warp, False)

    @cute.jit
    def _store(
        self, tensors: Tensors, tile: WorkTile, factor: Float32, sums: Int32, s: Any, warp: Int32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        row = warp * 32 + cute.arch.lane_idx()
        feature, step = tile.row * WEIGHT_ROWS + row, tensors.partial.stride[0] * 4
        at = tensors.partial.iterator.toint() + Int64(tile.first) * step + feature * 4
        for first in cutlass.range(0, tile.columns, COLUMN_STEP, unroll=1):
            some = tmem.load(sums + first, COLUMN_STEP)
            tmem.await_loads()
            y = some if const_expr(simple) else _completed(some, factor, s.sBias[row])
            if feature < Int32(tensors.down.packed.shape[1]):
                if first + COLUMN_STEP <= tile.columns:
                    for i in cutlass.range_constexpr(COLUMN_STEP):
                        op.store_float(at + i * step, y[i])
                else:
                    for i in cutlass.range_constexpr(COLUMN_STEP):
                        if first + i < tile.columns:
                            op.store_float(at + i * step, y[i])
            at += COLUMN_STEP * step


class DequantSwiglu(_Transposed):
    """h = swiglu(gate, up) of a tile, rounded to the dtype of x, or fake-quantised. A thread has a block of a token."""

    def __init__(self, config: DequantConfig):
        self.c, self.rounded = config, FAKE_QUANTIZE[config.activations]
        self.each = 32 if config.activations in ("mxfp4", "mxfp8") else FEATURES // RESULT_WARPS

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, bias: Float32, sums: Int32,
        shared: Int32, warp: Int32,
    ):  # fmt: skip
        lane, each = cute.arch.lane_idx(), const_expr(self.each)
        features = Int32(tensors.up.packed.shape[1]) // 2
        feature = tile.row * FEATURES + warp * each
        global_scale = global_scale_of(scalars.down, tensors.down)
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            some = tmem.load(sums + first, CHUNK)
            tmem.await_loads()
            sync_epilogue()  # the last chunk was read
            for i in cutlass.range_constexpr(CHUNK):
                self.floats(shared + (i * PITCH + warp * 32 + lane) * 4, 1)[0] = op.fma(some[i], factor, bias)
            sync_epilogue()
            if (warp * each < FEATURES) & (first + lane < tile.columns) & (feature < features):
                at = shared + (lane * PITCH + warp * each) * 4
                gate, up = self.gate_and_up(at, each)
                for i in cutlass.range_constexpr(0, each, 2):
                    gate[i], gate[i + 1] = swiglu(scalars, (gate[i], gate[i + 1]), (up[i], up[i + 1]), False)
                if const_expr(self.rounded is not None):
                    self.rounded(gate, global_scale)
                self._store(tensors, tile.first + first + lane, feature, features, gate)

    def _store(self, tensors: Tensors, dest: Int32, feature: Int32, features: Int32, rH: cute.Tensor) -> None:
        """As ``SortAndPermute`` stores rows of x."""
        values = [rH[i] for i in range(self.each)]
        if self.c.parts == 1:
            parts = [values]
        else:
            parts = list(zip(*(split(h.to(Float16).to(Float32)) for h in values), strict=True))
        row = tensors.h.iterator.toint() + (Int64(dest) * tensors.h.stride[0] + feature) * 2
        for part, x in enumerate(parts):
            words = [op.pack(BFloat16, x[s + i], x[s + i + 4]) for s in range(0, self.each, 8) for i in range(4)]
            for i in range(0, len(words), 4):
                copies.store_words(row + part * features * 2 + 4 * i, words[i : i + 4])


class DequantStore(StoreEpilogue):
    """y of a tile, in float32 and in the order of ``h``; then the top-k reduction."""

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, bias: Float32, sums: Int32,
        shared: Int32, warp: Int32,
    ):  # fmt: skip
        feature = tile.row * WEIGHT_ROWS + warp * 32 + cute.arch.lane_idx()
        inside = feature < Int32(tensors.down.packed.shape[1])
        at = tensors.partial.iterator.toint() + (Int64(tile.first) * tensors.partial.stride[0] + feature) * 4
        step = tensors.partial.stride[0] * 4
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            some = tmem.load(sums + first, CHUNK)
            tmem.await_loads()
            for i in cutlass.range_constexpr(CHUNK):
                if inside & (first + i < tile.columns):
                    op.store_float(at + Int64(first + i) * step, op.fma(some[i], factor, bias))
        sync_epilogue()  # a token's features are those of all warps, and its sums any one's
        self.reduce.run(tensors, scalars, tile, warp)
