"""What becomes of sums under block scales whose columns are tokens: rows of weights are the lanes."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import tmem

from ..sm90.arguments import Scalars, Tensors, global_scale_of
from ..sm90.schedule import WorkTile
from .config import BITS, CHUNK, COLUMN_STEP, FEATURES, PITCH, TOKEN_BLOCK, WEIGHT_ROWS, Rows
from .epilogue import meet
from .quantise import quantised
from .swiglu import plain, swiglu
from .totals import Totals


def _completed(some: list[Float32], factor: Float32, bias: Float32 | None) -> list[Float32]:
    """Sums of a lane's row to numbers."""
    return [x * factor if bias is None else op.fma(x, factor, bias) for x in some]


class ColumnActivation(Fixed):
    """h = swiglu(gate, up) of a row tile, quantised as ``config.Rows`` has rows. Sums of 32 tokens at a time meet in
    shared memory, where a thread takes a token's block of features: rows of gate and of up are in other lanes."""

    shared_bytes = CHUNK * PITCH * 4  # of sums on their way from rows to tokens

    def __init__(self, activations: str):
        self.activations = activations
        self.block, self.bits = TOKEN_BLOCK[activations], BITS[activations]

    def plain(self, scalars: Scalars) -> Any:
        """As ``Activation`` has it."""
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
            meet()  # the last chunk was read
            for i in cutlass.range_constexpr(0, CHUNK, COLUMN_STEP):
                if first + i < tile.columns:
                    some = tmem.load(sums + first + i, COLUMN_STEP)
                    tmem.await_loads()
                    for j, x in enumerate(_completed(some, factor, bias)):
                        self._words(s.results + ((i + j) * PITCH + thread) * 4, 1)[0] = x
            meet()
            self._block(tensors, scalars, tile, first, s.results, thread, simple)

    @cute.jit
    def _block(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, first: Int32, shared: Int32, thread: Int32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        """A block of a token of the chunk by every thread, as long as there are some."""
        blocks = const_expr(FEATURES // self.block)  # of a token
        token, part = thread // blocks, thread % blocks * self.block
        if (token < CHUNK) & (first + token < tile.columns):
            at = shared + (token * PITCH + part) * 4
            gate, up = (cute.make_rmem_tensor(self.block, Float32) for _ in range(2))
            cute.autovec_copy(self._words(at, self.block), gate)
            cute.autovec_copy(self._words(at + FEATURES * 4, self.block), up)
            h = []
            for i in cutlass.range_constexpr(0, self.block, 2):
                h += swiglu(scalars, (gate[i], gate[i + 1]), (up[i], up[i + 1]), simple)
            result = quantised(self.activations, h, global_scale_of(scalars.down, tensors.down))
            features = Int32(tensors.up.codes.shape[1]) >> 1
            row = tensors.h.iterator.toint() + Int64(tile.first + first + token) * tensors.h.stride[0] * 2
            feature = tile.row * FEATURES + part
            self._store(row + (feature * self.bits >> 3), [Uint32(word) for word in result.codes])
            scale = cutlass.select_(feature < features, result.scales[0], Int32(0))
            behind = Rows(features, self.activations).code_bytes
            self._store(row + behind + Int32(Uint32(feature) // self.block), [Uint8(scale)])

    def _words(self, address: Int32, count: int) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=min(4 * count, 16))
        return cute.make_tensor(pointer, cute.make_layout(count))

    def _store(self, address: Int64, values: list[Any]) -> None:
        """Neighbours, from a multiple of their size on."""
        kind = type(values[0])
        some = cute.make_rmem_tensor(len(values), kind)
        for i, value in enumerate(values):
            some[i] = value
        align = min(len(values) * kind.width // 8, 16)
        target = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=align)
        cute.autovec_copy(some, cute.make_tensor(target, cute.make_layout(len(values))))


class ColumnResults(Fixed):
    """y of a row tile as ``Results`` has it, a token's features by neighbouring lanes; then tokens' sums."""

    shared_bytes = 0

    def __init__(self, totals: Totals):
        self.totals = totals

    def plain(self, scalars: Scalars) -> Any:
        return scalars.down.bias == 0

    def end(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> None:
        meet()  # a token's features are those of all warps, and its sums any one's
        self.totals.run(tensors, scalars, tile, warp)

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
            if feature < Int32(tensors.down.codes.shape[1]):
                if first + COLUMN_STEP <= tile.columns:
                    for i in cutlass.range_constexpr(COLUMN_STEP):
                        op.store_float(at + i * step, y[i])
                else:
                    for i in cutlass.range_constexpr(COLUMN_STEP):
                        if first + i < tile.columns:
                            op.store_float(at + i * step, y[i])
            at += COLUMN_STEP * step
