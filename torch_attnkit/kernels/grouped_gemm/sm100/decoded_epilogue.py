"""What becomes of a work tile's sums whose lanes are rows of weights and whose columns are tokens."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import tmem

from ..sm90.arguments import Scalars, Tensors, global_scale_of
from ..sm90.rounding import ROUNDED
from ..sm90.rows import split
from ..sm90.schedule import WorkTile
from .config import CHUNK, FEATURES, PITCH, RESULT_WARPS, WEIGHT_ROWS, DecodedConfig
from .epilogue import meet
from .swiglu import swiglu
from .totals import Totals

_SHARED_BYTES = CHUNK * PITCH * 4  # of sums on their way from rows to tokens


class DecodedActivation(Fixed):
    """h = swiglu(gate, up) of a work tile, as the second product wants it: rounded to the dtype of x, or to the numbers
    that codes stand for. Sums of 32 tokens at a time meet in shared memory, where a thread takes a token's block of
    features."""

    def __init__(self, config: DecodedConfig):
        self.c, self.rounded = config, ROUNDED[config.activations]
        self.each = 32 if config.activations in ("mxfp4", "mxfp8") else FEATURES // RESULT_WARPS
        self.shared_bytes = _SHARED_BYTES

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, bias: Float32, sums: Int32,
        shared: Int32, warp: Int32,
    ):  # fmt: skip
        lane, each = cute.arch.lane_idx(), const_expr(self.each)
        features = Int32(tensors.up.codes.shape[1]) // 2
        feature = tile.row * FEATURES + warp * each
        global_scale = global_scale_of(scalars.down, tensors.down)
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            some = tmem.load(sums + first, CHUNK)
            tmem.await_loads()
            meet()  # the last chunk was read
            for i in cutlass.range_constexpr(CHUNK):
                self._words(shared + (i * PITCH + warp * 32 + lane) * 4, 1)[0] = op.fma(some[i], factor, bias)
            meet()
            if (warp * each < FEATURES) & (first + lane < tile.columns) & (feature < features):
                at = shared + (lane * PITCH + warp * each) * 4
                gate, up = (cute.make_rmem_tensor(each, Float32) for _ in range(2))
                cute.autovec_copy(self._words(at, each), gate)
                cute.autovec_copy(self._words(at + FEATURES * 4, each), up)
                for i in cutlass.range_constexpr(0, each, 2):
                    gate[i], gate[i + 1] = swiglu(scalars, (gate[i], gate[i + 1]), (up[i], up[i + 1]), False)
                if const_expr(self.rounded is not None):
                    self.rounded(gate, global_scale)
                self._store(tensors, tile.first + first + lane, feature, features, gate)

    def _words(self, address: Int32, count: int) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=min(4 * count, 16))
        return cute.make_tensor(pointer, cute.make_layout(count))

    def _store(self, tensors: Tensors, place: Int32, feature: Int32, features: Int32, rH: cute.Tensor) -> None:
        """As ``SortAndPermute`` stores rows of x."""
        numbers = [rH[i] for i in range(self.each)]
        if self.c.parts == 1:
            parts = [numbers]
        else:
            parts = list(zip(*(split(h.to(Float16).to(Float32)) for h in numbers), strict=True))
        row = tensors.h.iterator.toint() + (Int64(place) * tensors.h.stride[0] + feature) * 2
        for part, x in enumerate(parts):
            words = [op.pack(BFloat16, x[s + i], x[s + i + 4]) for s in range(0, self.each, 8) for i in range(4)]
            for i in range(0, len(words), 4):
                copies.store_words(row + part * features * 2 + 4 * i, words[i : i + 4])


class DecodedResults:
    """y of a work tile, in float32 and in the order of ``h``; then what is complete is added up."""

    shared_bytes = 0

    def __init__(self, totals: Totals):
        self.totals = totals

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, factor: Float32, bias: Float32, sums: Int32,
        shared: Int32, warp: Int32,
    ):  # fmt: skip
        feature = tile.row * WEIGHT_ROWS + warp * 32 + cute.arch.lane_idx()
        inside = feature < Int32(tensors.down.codes.shape[1])
        at = tensors.partial.iterator.toint() + (Int64(tile.first) * tensors.partial.stride[0] + feature) * 4
        step = tensors.partial.stride[0] * 4
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            some = tmem.load(sums + first, CHUNK)
            tmem.await_loads()
            for i in cutlass.range_constexpr(CHUNK):
                if inside & (first + i < tile.columns):
                    op.store_float(at + Int64(first + i) * step, op.fma(some[i], factor, bias))
        meet()  # a token's features are those of all warps, and its sums any one's
        self.totals.run(tensors, scalars, tile, warp)
