"""Epilogues of the ``wgmma`` kernel: h in the order of experts and in the K order of permute_k.py; the second GEMM's
results in float32 in the order of experts.

Of every 8 tokens a lane has two neighbours, for a row of its warp and the one ``row_step`` further on.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Scalars, Tensors, global_scale_of
from ..permute_k import permuted
from ..problem import SPAN
from ..weight_scales import load_words
from ..work_tiles import WorkTile
from .config import WARP_ROWS, WgmmaConfig
from .epilogue_mma import SwigluEpilogue
from .mainloop_mma import row_of

_GROUPS = 4  # groups of 8 tokens, one for each warp of a warpgroup


def _groups_in_flight(tokens: int) -> int:
    """Groups of 8 tokens whose activations are computed side by side: more would spill registers."""
    return 4 if tokens <= 224 else 2


class WgmmaSwiglu:
    """h = swiglu(gate, up), in the K order of ``permute_k.py``.

    Of 8 features of a warp, quads of lanes have those that are neighbours in h, 4 apart, so pairs become words.
    """

    row_step = 8

    def __init__(self, config: WgmmaConfig):
        self.c, self.activation = config, SwigluEpilogue(config)

    def row(self, warp: Int32, lane: Int32) -> Int32:
        """The first row of a lane, in the box: that of gate; 8 further on is up."""
        return warp * WARP_ROWS + row_of(lane)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, shared: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        features = Int32(tensors.up.packed.shape[1]) // 2
        eight = tile.row * self.c.features + warp * 8
        feature = eight + row_of(lane)
        bias = self.activation.bias(tensors, scalars, tile, feature)
        # A word of the transposed tile has the features q and q + 4 of the eight, q being lane % 4.
        span, c, w = eight // SPAN * SPAN, eight // 32 % 4, eight // 8 % 4
        row = tensors.h.stride[0]
        row_idx = tile.first + lane // 4
        at = tensors.h.iterator.toint() + (Int64(row_idx) * row + span + 32 * w + 8 * (lane % 4) + 2 * c) * 2
        left = cutlass.select_(span < Int32(tensors.h.shape[1]), tile.columns - lane // 4, Int32(0))
        for start in cutlass.range_constexpr(0, tokens // 8, _groups_in_flight(tokens)):
            if tile.columns > 8 * start:
                for group in cutlass.range_constexpr(start, min(start + _groups_in_flight(tokens), tokens // 8)):
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


class WgmmaSwigluQuantize(WgmmaSwiglu):
    """The same, fake-quantised. A warpgroup's 32 features are whole blocks: 32 tokens at a time are exchanged through
    shared memory, from which a quad of lanes takes a token's."""

    def __init__(self, config: WgmmaConfig, rounded: Any):
        super().__init__(config)
        self.rounded = rounded

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, shared: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        features = Int32(tensors.up.packed.shape[1]) // 2
        local = warp * 8 + row_of(lane)
        feature = tile.row * self.c.features + local
        bias = self.activation.bias(tensors, scalars, tile, feature)
        sH = self._features(shared)
        for start in cutlass.range_constexpr(0, tokens // 8, _GROUPS):
            if tile.columns > 8 * start:
                for i in cutlass.range_constexpr(min(_GROUPS, tokens // 8 - start)):
                    for j in cutlass.range_constexpr(2):
                        h = self.h(scalars, rSum, start + i, j, factor, bias)
                        sH[8 * i + lane % 4 * 2 + j, local] = cutlass.select_(feature < features, h, Float32(0.0))
                self._sync(warp)
                if tile.columns > 8 * (start + warp % 4):
                    self._round(tensors, scalars, tile, shared, 8 * (start + warp % 4) + lane // 4, warp, lane)
                self._sync(warp)  # before the next tokens' features are written

    def _features(self, shared: Int32) -> cute.Tensor:
        """(tokens, features)"""
        pointer = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=16)
        shape = (8 * _GROUPS, self.c.features)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(self.c.result_pitch, 1)))

    def _sync(self, warp: Int32) -> None:
        """All of a warpgroup."""
        cute.arch.barrier(barrier_id=1 + warp // 4, number_of_threads=128)

    @cute.jit
    def _round(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, token: Int32, warp: Int32, lane: Int32
    ):
        """A lane has 8 features of a token."""
        first = warp // 4 * 32 + lane % 4 * 8
        at = shared + (token % (8 * _GROUPS) * self.c.result_pitch + first) * 4
        rX = cute.make_rmem_tensor(8, Float32)
        for i in cutlass.range_constexpr(2):
            four = load_words(at + 16 * i, 4, Float32)
            for j in cutlass.range_constexpr(4):
                rX[4 * i + j] = four[j]
        self.rounded(rX, global_scale_of(scalars.down, tensors.down))
        feature = tile.row * self.c.features + first
        if (token < tile.columns) & (feature < Int32(tensors.h.shape[1])):
            to = tensors.h.iterator.toint() + (Int64(tile.first + token) * tensors.h.stride[0] + permuted(feature)) * 2
            pointer = cute.make_ptr(Int32, to, cute.AddressSpace.gmem, assumed_align=4)
            words = cute.make_tensor(pointer, cute.make_layout(4, stride=4))
            for i in cutlass.range_constexpr(4):
                words[i] = op.pack(tensors.h.element_type, rX[i], rX[i + 4])


class WgmmaStore:
    """The second GEMM's results, with biases, in float32; a lane's two features are neighbours."""

    row_step = 1

    def __init__(self, config: WgmmaConfig):
        self.c = config

    def row(self, warp: Int32, lane: Int32) -> Int32:
        quad = lane // 4  # rows that a quarter of a warp reads at once are four apart, see ``row_of``
        return warp * WARP_ROWS + (quad & 1) * 4 + (quad >> 1 & 1) * 2 + (quad >> 2) * 8

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        tokens: cutlass.Constexpr, shared: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        flags, weights = scalars.down, tensors.down
        features = Int32(weights.packed.shape[1])
        feature = tile.row * self.c.rows + self.row(warp, lane)
        if feature < features:  # so is the other: there are multiples of 16
            bias = [Float32(0.0), Float32(0.0)]
            if flags.bias != 0:
                for part in cutlass.range_constexpr(2):
                    bias[part] = Float32(weights.bias[tile.expert, feature + part])
            row = tensors.partial.stride[0]
            row_idx = tile.first + lane % 4 * 2
            at = tensors.partial.iterator.toint() + (Int64(row_idx) * row + feature) * 4
            left = tile.columns - lane % 4 * 2
            for group in cutlass.range_constexpr(tokens // 8):
                for j in cutlass.range_constexpr(2):
                    if left > 8 * group + j:
                        y = [rSum[4 * group + 2 * part + j] * factor + bias[part] for part in range(2)]
                        memory_ops.store_2_floats(at + j * row * 4, y)
                at += row * 32
