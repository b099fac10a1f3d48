"""Epilogues with tokens as lanes of tensor memory: h = SwiGLU, quantised; or the second GEMM's results.

A lane of the four warps has a token, whose accumulators are a row of tensor memory: a block's features are in one
thread.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.sm100 import tmem

from ..arguments import Flags, Matrices, Scalars, Tensors, global_scale_of
from ..work_tiles import WorkTile
from .config import BITS, FEATURES, RESULT_WARPS, TOKEN_BLOCK, WEIGHT_ROWS, QuantizedRow
from .load_scales import weight_row
from .swiglu_quantize import Pair, plain, quantize, swiglu, twice
from .topk_reduce import TopkReduce

_IN_FLIGHT = 32  # features of a result that a thread has on their way
_FEATURES = 32  # and of h: whole blocks
_SUMS = 16  # of these so many at a time: gate and up of more, and their biases, would leave too few registers


@cute.jit
def factor_of(flags: Flags, weights: Matrices, expert: Int32) -> Float32:
    """The factor of accumulators: global scales divide."""
    divisor = Float32(1.0)
    if flags.divisor != 0:
        divisor = weights.divisor[expert]
    if flags.activation != 0:
        divisor *= weights.activation[0]
    return Float32(1.0) / divisor


@cute.jit
def load_biases(
    config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, sBias: cute.Tensor, thread: Int32
):
    """Of the row tile, zeros without; synchronises the epilogue warps."""
    bias = Float32(0.0)
    if flags.bias != 0:
        bias = Float32(weights.bias[tile.expert, weight_row(config, flags, weights, tile, thread)])
    sync_epilogue()  # all have read the last row tile's
    sBias[thread] = bias
    sync_epilogue()


def sync_epilogue() -> None:
    """The epilogue warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=32 * RESULT_WARPS)


def biases(sBias: cute.Tensor, first: Int32, count: int) -> cute.Tensor:
    """Neighbouring ones, by vector loads."""
    r = cute.make_rmem_tensor(count, Float32)
    at = cute.make_ptr(Float32, sBias.iterator.toint() + first * 4, cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(count)), r)
    return r


def completed(some: list[Float32], factor: Float32, bias: cute.Tensor | None) -> list[Pair]:
    """Accumulators times their factor, plus biases, in pairs."""
    sums = [(some[i], some[i + 1]) for i in range(0, len(some), 2)]
    if bias is None:
        return [cute.arch.mul_packed_f32x2(pair, twice(factor)) for pair in sums]
    of = [(bias[i], bias[i + 1]) for i in range(0, len(some), 2)]
    return [cute.arch.fma_packed_f32x2(pair, twice(factor), b) for pair, b in zip(sums, of, strict=True)]


class SwigluEpilogue:
    """h = swiglu(gate, up) of a row tile, quantised as ``QuantizedRow`` has rows."""

    shared_bytes = 0

    def __init__(self, activations: str):
        self.activations = activations

    def plain(self, scalars: Scalars) -> Any:
        """Whether accumulators take nothing but a factor, gate * sigmoid(gate) * up."""
        return plain(scalars) & (scalars.up.bias == 0)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, s: Any,
        warp: Int32,
    ):  # fmt: skip
        """``sums``: the columns of tensor memory, as this warp reaches them."""
        token = warp * 32 + cute.arch.lane_idx()
        if warp * 32 < tile.columns:
            if self.plain(scalars):
                self._blocks(tensors, scalars, tile, factor, sums, s.sBias, token, True)
            else:
                self._blocks(tensors, scalars, tile, factor, sums, s.sBias, token, False)

    @cute.jit
    def _blocks(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, sBias: cute.Tensor,
        token: Int32, simple: cutlass.Constexpr,
    ):  # fmt: skip
        block, bits = const_expr(TOKEN_BLOCK[self.activations]), const_expr(BITS[self.activations])
        features = Int32(tensors.up.packed.shape[1]) >> 1
        row = tensors.h.iterator.toint() + Int64(tile.first + token) * tensors.h.stride[0] * 2
        behind = QuantizedRow(features, self.activations).code_bytes
        global_scale = global_scale_of(scalars.down, tensors.down)
        for first in cutlass.range(0, FEATURES, _FEATURES, unroll=1):
            h = []
            for some in cutlass.range_constexpr(0, _FEATURES, _SUMS):
                h += self._features(scalars, factor, sums + first + some, sBias, first + some, simple)
            result = quantize(self.activations, h, global_scale)
            feature = tile.row * FEATURES + first
            if token < tile.columns:
                for i in cutlass.range_constexpr(0, len(result.packed), 4):
                    copies.store_words(row + (feature * bits >> 3) + 4 * i, result.packed[i : i + 4])
                scales = [cutlass.select_(feature + i * block < features, s, 0) for i, s in enumerate(result.scales)]
                self._store_scales(row + behind + Int32(Uint32(feature) // block), scales)

    def end(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> None:
        """Nothing is left to do."""

    def _features(
        self, scalars: Scalars, factor: Float32, sums: Int32, sBias: cute.Tensor, first: Int32, simple: bool
    ) -> list[Float32]:
        """Of a thread's token."""
        parts = []
        for part in range(2):
            some = tmem.load(sums + part * FEATURES, _SUMS)
            bias = None if simple else biases(sBias, part * FEATURES + first, _SUMS)
            tmem.await_loads()
            parts.append(completed(some, factor, bias))
        return [h for gate, up in zip(*parts, strict=True) for h in swiglu(scalars, gate, up, simple)]

    def _store_scales(self, address: Int64, scales: list[Int32]) -> None:
        kind = {1: Uint8, 2: Uint16}[len(scales)]
        word = scales[0]
        for i, byte in enumerate(scales[1:], 1):
            word = word | (byte << (8 * i))
        target = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=len(scales))
        cute.make_tensor(target, cute.make_layout(1))[0] = kind(word)


class StoreEpilogue:
    """y of a row tile, in float32 and in the order of ``h``; behind a tile's last row tile, the top-k reduction.
    Without biases the reduction applies the expert's factor, together with the choice's weight."""

    shared_bytes = 0

    def __init__(self, reduce: TopkReduce):
        self.reduce = reduce

    def plain(self, scalars: Scalars) -> Any:
        return scalars.down.bias == 0

    def end(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> None:
        self.reduce.run(tensors, scalars, tile, warp)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, sums: Int32, s: Any,
        warp: Int32,
    ):  # fmt: skip
        token = warp * 32 + cute.arch.lane_idx()
        if warp * 32 < tile.columns:
            if self.plain(scalars):
                self._store(tensors, tile, factor, sums, s.sBias, token, True)
            else:
                self._store(tensors, tile, factor, sums, s.sBias, token, False)

    @cute.jit
    def _store(
        self, tensors: Tensors, tile: WorkTile, factor: Float32, sums: Int32, sBias: cute.Tensor, token: Int32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        features = Int32(tensors.down.packed.shape[1])
        row = Int64(tile.first + token) * tensors.partial.stride[0] * 4
        for first in cutlass.range_constexpr(0, WEIGHT_ROWS, _IN_FLIGHT):
            y = tmem.load(sums + first, _IN_FLIGHT)
            bias = None if const_expr(simple) else biases(sBias, first, _IN_FLIGHT)
            tmem.await_loads()
            feature = tile.row * WEIGHT_ROWS + first
            if (token < tile.columns) & (feature < features):
                rY = cute.make_rmem_tensor(_IN_FLIGHT, Float32)
                if const_expr(simple):
                    for i in cutlass.range_constexpr(_IN_FLIGHT):
                        rY[i] = y[i]
                else:
                    for i, pair in enumerate(completed(y, factor, bias)):
                        rY[2 * i], rY[2 * i + 1] = pair
                at = tensors.partial.iterator.toint() + row + feature * 4
                target = cute.make_ptr(Float32, at, cute.AddressSpace.gmem, assumed_align=32)
                cute.autovec_copy(rY, cute.make_tensor(target, cute.make_layout(_IN_FLIGHT)))
