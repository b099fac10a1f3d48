"""What becomes of a work tile's sums by ``wgmma``: h in the order of experts, permuted, and the second product's
results in that order.

A lane has, of every 8 tokens, two neighbours, for a row of its warp and the one that is 8 further on. Imports cutlass.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import warp_ops as op

from .arguments import Scalars, Tensors
from .config import SPAN, WARP_ROWS, WgmmaConfig
from .epilogue import Activation
from .mainloop import row_of
from .schedule import WorkTile

# Groups of 8 tokens whose activations may be computed side by side: all together, they would spill registers.
_TOGETHER = 4


class Permuted:
    """h = swiglu(gate, up), as ``permute.py`` has x.

    Of 8 features of a warp, the quads of lanes have such as stand together in h: 4 apart in pairs, which become words,
    and 32 apart in pairs of these, which become 8 bytes.
    """

    def __init__(self, config: WgmmaConfig):
        self.c, self.activation = config, Activation(config)

    def row(self, warp: Int32, lane: Int32) -> Int32:
        """The first row of a lane, in the box: that of gate; 8 further on is up."""
        feature = self._feature(warp, lane)
        return feature // 8 * 16 + feature % 8

    def _feature(self, warp: Int32, lane: Int32) -> Int32:
        quad = lane // 4
        return (quad >> 1 & 1) * 32 + warp // 2 * 8 + (quad & 1) * 4 + warp % 2 * 2 + (quad >> 2)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, warp: Int32, lane: Int32,
    ):  # fmt: skip
        features = Int32(tensors.up.codes.shape[1]) // 2
        feature = tile.row * self.c.features + self._feature(warp, lane)
        bias = self.activation.bias(tensors, scalars, tile, feature)
        # A word of the transposed tile has features b = 0 and 1 of the quads 2 c and 2 c + 1, c being lane % 4.
        first = warp // 2 * 32 + warp % 2 * 16 + (lane >> 1 & 1) * 8 + (lane & 1) * 2 + (tile.row & 1) * 4
        row = tensors.h.stride[0]
        place = tile.first + lane // 4
        at = tensors.h.iterator.toint() + (Int64(place) * row + tile.row // 2 * SPAN + first) * 2
        left = tile.columns - lane // 4
        for start in cutlass.range_constexpr(0, tokens // 8, _TOGETHER):
            if tile.columns > 8 * start:
                for group in cutlass.range_constexpr(start, min(start + _TOGETHER, tokens // 8)):
                    # Beyond the last feature are zeros, whatever the tokens hold: they meet weights that are zero.
                    h = [
                        cutlass.select_(feature < features, self.h(scalars, rSum, group, j, factor, bias), Float32(0.0))
                        for j in range(2)
                    ]
                    word = op.transpose_8x8(op.pack(tensors.h.element_type, *h))
                    if left > 8 * group:
                        target = cute.make_ptr(Int32, at + group * row * 16, cute.AddressSpace.gmem, assumed_align=4)
                        cute.make_tensor(target, cute.make_layout(1))[0] = word

    def h(
        self, scalars: Scalars, rSum: cute.Tensor, group: int, j: int, factor: Float32, bias: list[Float32]
    ) -> Float32:
        gate, up = (rSum[4 * group + 2 * part + j] * factor + bias[part] for part in range(2))
        return self.activation.swiglu(scalars, gate, up)


class Plain:
    """h = swiglu(gate, up) in float32, to be rounded."""

    def __init__(self, config: WgmmaConfig):
        self.c, self.permuted = config, Permuted(config)

    def row(self, warp: Int32, lane: Int32) -> Int32:
        return warp * WARP_ROWS + row_of(lane)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, warp: Int32, lane: Int32,
    ):  # fmt: skip
        feature = tile.row * self.c.features + warp * (WARP_ROWS // 2) + row_of(lane)
        if feature < Int32(tensors.h.shape[1]):
            bias = self.permuted.activation.bias(tensors, scalars, tile, feature)
            row = tensors.h.stride[0]
            place = tile.first + lane % 4 * 2
            at = tensors.h.iterator.toint() + (Int64(place) * row + feature) * 4
            left = tile.columns - lane % 4 * 2
            for start in cutlass.range_constexpr(0, tokens // 8, _TOGETHER):
                if tile.columns > 8 * start:
                    for group in cutlass.range_constexpr(start, min(start + _TOGETHER, tokens // 8)):
                        for j in cutlass.range_constexpr(2):
                            if left > 8 * group + j:
                                h = self.permuted.h(scalars, rSum, group, j, factor, bias)
                                op.store_float(at + (8 * group + j) * row * 4, h)


class Results:
    """The second product's results, with biases, in float32."""

    def __init__(self, config: WgmmaConfig):
        self.c = config

    def row(self, warp: Int32, lane: Int32) -> Int32:
        return warp * WARP_ROWS + row_of(lane)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, warp: Int32, lane: Int32,
    ):  # fmt: skip
        flags, weights = scalars.down, tensors.down
        features = Int32(weights.codes.shape[1])
        feature = tile.row * self.c.rows + self.row(warp, lane)
        if feature < features:  # so is the other: there are multiples of 16
            bias = [Float32(0.0), Float32(0.0)]
            if flags.bias != 0:
                for part in cutlass.range_constexpr(2):
                    bias[part] = Float32(weights.bias[tile.expert, feature + 8 * part])
            row = tensors.partial.stride[0]
            place = tile.first + lane % 4 * 2
            at = tensors.partial.iterator.toint() + (Int64(place) * row + feature) * 4
            left = tile.columns - lane % 4 * 2
            for group in cutlass.range_constexpr(tokens // 8):
                for j in cutlass.range_constexpr(2):
                    if left > 8 * group + j:
                        for part in cutlass.range_constexpr(2):
                            y = rSum[4 * group + 2 * part + j] * factor + bias[part]
                            op.store_float(at + (j * row * 4 + 32 * part), y)
                at += row * 32
