"""What becomes of a work tile's sums: activations of the first product, tokens' results of the second. Imports cutlass.

A result of the second product goes into the workspace, weighted. The block that brings the last of a token's choices
for some features adds them up in the order of the choices, so that the result does not depend on who came last.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import LOWERED
from torch_attnkit.cuda.ring import Ring

from ...norm.kernel import sigmoid
from .arguments import Flags, Matrices, Scalars, Tensors, chosen
from .config import COMBINERS, CONSUMERS, WARP_ROWS, Config
from .mainloop import row_of
from .schedule import Work, WorkTile


@cute.jit
def raised(config: cutlass.Constexpr, flags: Flags, weights: Matrices, expert: Int32) -> Float32:
    """What a sum has to be multiplied by: decoded weights are too small, and global scales divide."""
    factor = Float32(2.0 ** LOWERED[config.format])
    divisor = Float32(1.0)
    if flags.divisor != 0:
        divisor = weights.divisor[expert]
    if flags.activation != 0:
        divisor *= weights.activation[0]
    return factor / divisor


class Activation:
    """h = swiglu(gate, up) of a work tile, into the workspace."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def begin(self, tensors: Tensors, warp: Int32):
        """Tokens without any expert are zeros."""
        lane = cute.arch.lane_idx()
        tokens, top_k = Int32(tensors.indices.shape[0]), Int32(tensors.indices.shape[1])
        step = cute.arch.grid_dim()[0] * CONSUMERS
        for t in cutlass.range(cute.arch.block_idx()[0] * CONSUMERS + warp, tokens, step, unroll=1):
            some = Int32(0)
            for k in cutlass.range(lane, top_k, 32, unroll=1):
                some += cutlass.select_(chosen(tensors, t, k) >= 0, Int32(1), Int32(0))
            if cute.arch.warp_redux_sync(some, "add") == 0:
                for i in cutlass.range(lane, Int32(tensors.out.shape[1]), 32, unroll=1):
                    tensors.out[t, i] = tensors.out.element_type(0.0)

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, results: Ring, turn: Int32,
        warp: Int32,
    ):  # fmt: skip
        lane = cute.arch.lane_idx()
        features = Int32(tensors.up.codes.shape[1]) // 2
        feature = tile.row * self.c.features + warp * (WARP_ROWS // 2) + row_of(lane)
        if (warp < self.c.row_warps) & (feature < features):
            factor = raised(self.c, scalars.up, tensors.up, tile.expert)
            bias = self.bias(tensors, scalars, tile, feature)
            for group in cutlass.range_constexpr(self.c.columns // 8):
                for j in cutlass.range_constexpr(2):
                    column = 8 * group + lane % 4 * 2 + j
                    if column < tile.columns:
                        gate, up = (rSum[j + 2 * part, group, 0] * factor + bias[part] for part in range(2))
                        h = self.swiglu(scalars, gate, up)
                        tensors.h[tile.first + column, feature] = h.to(tensors.h.element_type)

    @cute.jit
    def bias(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, feature: Int32):
        """Of the gate and up of a feature."""
        flags, weights = scalars.up, tensors.up
        features = Int32(weights.codes.shape[1]) // 2
        bias = [Float32(0.0), Float32(0.0)]
        if (flags.bias != 0) & (feature < features):
            for part in cutlass.range_constexpr(2):
                row = cutlass.select_(flags.interleaved != 0, feature * 2 + part, feature + part * features)
                bias[part] = Float32(weights.bias[tile.expert, row])
        return bias

    def swiglu(self, scalars: Scalars, gate: Float32, up: Float32) -> Float32:
        limit = scalars.limit  # comparisons with NaN are false, so that it stays
        gate = cutlass.select_(gate > limit, limit, gate)
        up = cutlass.select_(up > limit, limit, cutlass.select_(up < -limit, -limit, up))
        slope = cutlass.select_(scalars.gptoss != 0, scalars.alpha, Float32(1.0))
        more = cutlass.select_(scalars.gptoss != 0, Float32(1.0), Float32(0.0))
        return gate * sigmoid(slope * gate) * (up + more)


class Combine:
    """Tokens' results. The consumers hand a work tile's partial results over to warps that look whether they are the
    last ones: that takes as long as half of a work tile, while which the next one is multiplied."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def begin(self, tensors: Tensors, warp: Int32):
        pass

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, results: Ring, turn: Int32,
        warp: Int32,
    ):  # fmt: skip
        if warp < self.c.row_warps:
            self._partial(tensors, scalars, rSum, tile, warp, cute.arch.lane_idx())
        full = results.await_empty(turn)
        cute.arch.sync_warp()  # orders the warp's stores before the arrival
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def combine(self, tensors: Tensors, share: Work, results: Ring, warp: Int32):
        """What the combining warps do; each has every ``COMBINERS``-th token of a work tile."""
        lane = cute.arch.lane_idx()
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            results.wait(turn)
            column, token = lane * COMBINERS + warp, Int32(-1)
            if column < tile.columns:
                token = self._arrive(tensors, tile, column)
            cute.arch.sync_warp()  # what a lane acquired is there for all
            for i in cutlass.range((tile.columns - warp + COMBINERS - 1) // COMBINERS, unroll=1):
                last = cute.arch.shuffle_sync(token, i)
                if last >= 0:
                    self._add_up(tensors, last, tile.row * self.c.rows, lane * 4)
            cute.arch.sync_warp()
            results.release(turn)

    @cute.jit
    def _partial(self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, warp: Int32, lane: Int32):
        flags, weights = scalars.down, tensors.down
        top_k, features = Int32(tensors.indices.shape[1]), Int32(weights.codes.shape[1])
        factor = raised(self.c, flags, weights, tile.expert)
        for group in cutlass.range_constexpr(self.c.columns // 8):
            for j in cutlass.range_constexpr(2):
                column = 8 * group + lane % 4 * 2 + j
                if column < tile.columns:
                    slot = tensors.order[tile.first + column]
                    weight = tensors.weights[slot // top_k, slot % top_k]
                    for part in cutlass.range_constexpr(2):
                        feature = tile.row * self.c.rows + warp * WARP_ROWS + row_of(lane) + 8 * part
                        if feature < features:
                            y = rSum[j + 2 * part, group, 0] * factor
                            if flags.bias != 0:
                                y += Float32(weights.bias[tile.expert, feature])
                            tensors.partial[slot, feature] = y * weight

    @cute.jit
    def _arrive(self, tensors: Tensors, tile: WorkTile, column: Int32):
        """The token of a column if this is the last of its results for these features, else -1."""
        top_k = Int32(tensors.indices.shape[1])
        token = tensors.order[tile.first + column] // top_k
        choices = Int32(0)
        for k in cutlass.range(top_k, unroll=1):
            choices += cutlass.select_(chosen(tensors, token, k) >= 0, Int32(1), Int32(0))
        at = Int64(token) * tensors.count.stride[0] + tile.row
        come = op.add_acq_rel(tensors.count.iterator.toint() + at * 4, Int32(1)) + 1
        if come == choices:
            tensors.count[token, tile.row] = Int32(0)
        return cutlass.select_(come == choices, token, Int32(-1))

    @cute.jit
    def _add_up(self, tensors: Tensors, token: Int32, first: Int32, more: Int32):
        """Four features of a token, from ``first + more`` on."""
        top_k, features = Int32(tensors.indices.shape[1]), Int32(tensors.out.shape[1])
        feature = first + more
        if (more < self.c.rows) & (feature < features):
            sums = [Float32(0.0)] * 4
            for k in cutlass.range(top_k, unroll=4):
                if chosen(tensors, token, k) >= 0:
                    row = Int64(token * top_k + k) * tensors.partial.stride[0]
                    values = op.load_4_floats(tensors.partial.iterator.toint() + (row + feature) * 4)
                    sums = [s + v for s, v in zip(sums, values, strict=True)]
            pairs = [op.pack(tensors.out.element_type, *sums[i : i + 2]) for i in (0, 2)]
            at = Int64(token) * tensors.out.stride[0] + feature
            op.store_2_pairs(tensors.out.iterator.toint() + at * 2, *pairs)
