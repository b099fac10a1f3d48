"""What becomes of a work tile's sums by ``wgmma``: h in the order of experts, permuted, and the second product's
results in that order.

A lane has, of every 8 tokens, two neighbours, for a row of its warp and the one that is ``row_step`` further on.
Imports cutlass.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op

from .arguments import Scalars, Tensors
from .config import SPAN, WARP_ROWS, WgmmaConfig
from .epilogue import Activation
from .mainloop import row_of
from .schedule import WorkTile


def _together(tokens: int) -> int:
    """Groups of 8 tokens whose activations may be computed side by side: more of them would spill registers."""
    return 4 if tokens <= 224 else 2


class Permuted:
    """h = swiglu(gate, up), as ``permute.py`` has x.

    Of 8 features of a warp, the quads of lanes have such as stand together in h, 4 apart, in pairs, which become words.
    """

    row_step = 8

    def __init__(self, config: WgmmaConfig):
        self.c, self.activation = config, Activation(config)

    def row(self, warp: Int32, lane: Int32) -> Int32:
        """The first row of a lane, in the box: that of gate; 8 further on is up."""
        return warp * WARP_ROWS + row_of(lane)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, warp: Int32, lane: Int32,
    ):  # fmt: skip
        features = Int32(tensors.up.codes.shape[1]) // 2
        eight = tile.row * self.c.features + warp * 8
        feature = eight + row_of(lane)
        bias = self.activation.bias(tensors, scalars, tile, feature)
        # A word of the transposed tile has the features q and q + 4 of the eight, q being lane % 4.
        span, c, w = eight // SPAN * SPAN, eight // 32 % 4, eight // 8 % 4
        row = tensors.h.stride[0]
        place = tile.first + lane // 4
        at = tensors.h.iterator.toint() + (Int64(place) * row + span + 32 * w + 8 * (lane % 4) + 2 * c) * 2
        left = cutlass.select_(span < Int32(tensors.h.shape[1]), tile.columns - lane // 4, Int32(0))
        for start in cutlass.range_constexpr(0, tokens // 8, _together(tokens)):
            if tile.columns > 8 * start:
                for group in cutlass.range_constexpr(start, min(start + _together(tokens), tokens // 8)):
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

    row_step = 8

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
            for start in cutlass.range_constexpr(0, tokens // 8, _together(tokens)):
                if tile.columns > 8 * start:
                    for group in cutlass.range_constexpr(start, min(start + _together(tokens), tokens // 8)):
                        for j in cutlass.range_constexpr(2):
                            if left > 8 * group + j:
                                h = self.permuted.h(scalars, rSum, group, j, factor, bias)
                                op.store_float(at + (8 * group + j) * row * 4, h)


class Results:
    """The second product's results, with biases, in float32; a lane's two features are neighbours."""

    row_step = 1

    def __init__(self, config: WgmmaConfig):
        self.c = config

    def row(self, warp: Int32, lane: Int32) -> Int32:
        quad = lane // 4  # rows that a quarter of a warp reads at once are four apart, see ``row_of``
        return warp * WARP_ROWS + (quad & 1) * 4 + (quad >> 1 & 1) * 2 + (quad >> 2) * 8

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
                    bias[part] = Float32(weights.bias[tile.expert, feature + part])
            row = tensors.partial.stride[0]
            place = tile.first + lane % 4 * 2
            at = tensors.partial.iterator.toint() + (Int64(place) * row + feature) * 4
            left = tile.columns - lane % 4 * 2
            for group in cutlass.range_constexpr(tokens // 8):
                for j in cutlass.range_constexpr(2):
                    if left > 8 * group + j:
                        y = [rSum[4 * group + 2 * part + j] * factor + bias[part] for part in range(2)]
                        memory_ops.store_2_floats(at + j * row * 4, y)
                at += row * 32
