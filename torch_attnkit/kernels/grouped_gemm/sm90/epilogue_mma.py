"""Epilogues of the ``mma.sync`` kernel: SwiGLU of the first GEMM, weighted top-k reduction of the second.

Results of the second go to a workspace, weighted. The CTA that writes the last of a token's choices for some features
sums them in the order of the choices, so that the result does not depend on which CTA that is.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4_weights import LOWERED
from torch_attnkit.cuda.ring import Ring

from ...norm.kernel import sigmoid
from ..arguments import Flags, Matrices, Scalars, Tensors, chosen, global_scale_of
from ..permute_k import permuted, split
from ..work_tiles import WorkTile
from .config import WARP_ROWS, Config
from .mainloop_mma import MmaSmem, row_of, sync_consumers
from .tile_scheduler import TileRing

_TOKENS, _IN_FLIGHT = 2, 4  # which a thread adds up at a time, and results of each that it has on their way


@cute.jit
def output_scale(config: cutlass.Constexpr, flags: Flags, weights: Matrices, expert: Int32) -> Float32:
    """The factor of an accumulator: decoded weights are too small, and global scales divide."""
    factor = Float32(2.0 ** LOWERED[config.format])
    divisor = Float32(1.0)
    if flags.divisor != 0:
        divisor = weights.divisor[expert]
    if flags.activation != 0:
        divisor *= weights.activation[0]
    return factor / divisor


class SwigluEpilogue:
    """h = swiglu(gate, up) of a tile, in K order (``permute_k.py``), fake-quantised if h is: a tile has whole blocks of
    features."""

    def __init__(self, config: Config, rounded: Any = None):
        self.c, self.rounded = config, rounded

    def lane_bias(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32) -> list[Float32]:
        """What ``run`` wants, known before the products."""
        return self.bias(tensors, scalars, tile, tile.row * self.c.features + self._local(warp))

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, bias: list[Float32], tile: WorkTile,
        tiles: TileRing, tile_idx: Int32, shared: MmaSmem, warp: Int32,
    ):  # fmt: skip
        """``bias``: as ``lane_bias`` has it."""
        lane = cute.arch.lane_idx()
        features = Int32(tensors.up.packed.shape[1]) // 2
        local = self._local(warp)
        feature = tile.row * self.c.features + local
        if warp < self.c.row_warps:
            factor = tiles.factor(tile_idx)
            addrs = Int32(permuted(Uint32(feature)))  # remainders of a signed number take 60 instructions
            for group in cutlass.range_constexpr(self.c.columns // 8):
                if tile.columns > 8 * group:  # the same for all lanes: two tokens' SwiGLU overlap, only stores branch
                    gates_and_ups = [
                        [rSum[j + 2 * part, group, 0] * factor + bias[part] for part in (0, 1)] for j in (0, 1)
                    ]
                    results = [self.swiglu(scalars, gate, up) for gate, up in gates_and_ups]
                    for j in cutlass.range_constexpr(2):
                        column = 8 * group + lane % 4 * 2 + j
                        if const_expr(self.rounded is not None):
                            if column < tile.columns:
                                sH = self._shared(shared, column, local)
                                sH[0] = cutlass.select_(feature < features, results[j], Float32(0.0))
                        elif (column < tile.columns) & (feature < features):
                            self._store(tensors, tile.first + column, addrs, results[j])
        if const_expr(self.rounded is not None):
            self._round(tensors, scalars, tile, shared, warp * 32 + lane)

    def _local(self, warp: Int32) -> Int32:
        """A lane's feature of a tile."""
        return warp * (WARP_ROWS // 2) + row_of(cute.arch.lane_idx())

    def _store(self, tensors: Tensors, row: Int32, addrs: Int32, h: Float32) -> None:
        """Rounded to ``x.dtype``, then as bf16 or the sum of two."""
        if self.c.parts == 1:
            tensors.h[row, addrs] = h.to(cutlass.BFloat16)
        else:
            for part, x in enumerate(split(h.to(cutlass.Float16).to(Float32))):
                tensors.h[row * 2 + part, addrs] = x.to(cutlass.BFloat16)

    def _shared(self, shared: MmaSmem, column: Int32, feature: Int32) -> cute.Tensor:
        """(32) features from one on."""
        at = shared.results + (column * self.c.result_pitch + feature) * 4
        pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(32))

    @cute.jit
    def _round(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: MmaSmem, thread: Int32):
        """A thread has 32 features of a token."""
        sync_consumers()
        global_scale = global_scale_of(scalars.down, tensors.down)
        column, block = thread % self.c.columns, thread // self.c.columns
        if (block < self.c.features // 32) & (column < tile.columns):
            rX = cute.make_rmem_tensor(32, Float32)
            rX.store(self._shared(shared, column, block * 32).load())
            self.rounded(rX, global_scale)
            first = permuted(tile.row * self.c.features + block * 32)
            for i in cutlass.range_constexpr(32):
                tensors.h[tile.first + column, first + (permuted(i))] = rX[i].to(cutlass.BFloat16)
        sync_consumers()  # before the next work tile's features are written

    @cute.jit
    def bias(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, feature: Int32):
        """Of the gate and up of a feature."""
        flags, weights = scalars.up, tensors.up
        features = Int32(weights.packed.shape[1]) // 2
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


class TopkEpilogue:
    """Results of a tile go to the workspace, weighted. Other warps count them; the one that finds a token's last sums
    that token, while the next tile is multiplied."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def lane_bias(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, warp: Int32):
        """What ``run`` wants, known before the products."""
        flags, weights = scalars.down, tensors.down
        bias = [Float32(0.0), Float32(0.0)]
        for part in cutlass.range_constexpr(2):
            feature = self._first(tile, warp) + 8 * part
            if (flags.bias != 0) & (warp < self.c.row_warps) & (feature < Int32(weights.packed.shape[1])):
                bias[part] = Float32(weights.bias[tile.expert, feature])
        return bias

    @cute.jit
    def run(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, bias: list[Float32], tile: WorkTile,
        tiles: TileRing, tile_idx: Int32, shared: MmaSmem, warp: Int32,
    ):  # fmt: skip
        """``bias``: as ``lane_bias`` has it."""
        if warp < self.c.row_warps:
            features, first = Int32(tensors.down.packed.shape[1]), self._first(tile, warp)
            factor = tiles.factor(tile_idx)
            for group in cutlass.range_constexpr(self.c.columns // 8):
                if tile.columns > 8 * group:
                    columns = [8 * group + cute.arch.lane_idx() % 4 * 2 + j for j in range(2)]
                    choices = [(tiles.slot(tile_idx, c), tiles.weight(tile_idx, c)) for c in columns]
                    for j, (slot, weight) in enumerate(choices):
                        for part in cutlass.range_constexpr(2):
                            y = (rSum[j + 2 * part, group, 0] * factor + bias[part]) * weight
                            if (columns[j] < tile.columns) & (first + 8 * part < features):
                                tensors.partial[slot, first + 8 * part] = y

    def _first(self, tile: WorkTile, warp: Int32) -> Int32:
        """Of a lane's two features."""
        return tile.row * self.c.rows + warp * WARP_ROWS + row_of(cute.arch.lane_idx())

    @cute.jit
    def combine(self, tensors: Tensors, tiles: TileRing, done: Ring, tile_idx: Int32):
        """By a reducing warp, of a tile, a token a lane."""
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        tile, token, choices = tiles.tile(tile_idx), tiles.slot(tile_idx, lane) // top_k, tiles.choices(tile_idx, lane)
        tiles.release(tile_idx)
        done.wait(tile_idx)
        whole = Int32(0)
        if lane < tile.columns:
            at = Int64(token) * tensors.count.stride[0] + tile.row
            if op.add_acq_rel(tensors.count.iterator.toint() + at * 4, Int32(1)) + 1 == choices:
                tensors.count[token, tile.row] = Int32(0)
                whole = Int32(1)
        cute.arch.sync_warp()  # what a lane acquired is there for all
        done.release(tile_idx)
        rest = cute.arch.vote_ballot_sync(whole != 0)
        while rest != 0:
            some, present = [], []
            for _ in cutlass.range_constexpr(_TOKENS):
                column = cute.arch.popc((rest & -rest) - 1) % 32
                some.append(cute.arch.shuffle_sync(token, column))
                present.append(cutlass.select_(rest != 0, Int32(1), Int32(0)))
                rest = rest & (rest - 1)
            self.add_up(tensors, some, present, tile.row * self.c.rows, lane * 4)

    @cute.jit
    def add_up(self, tensors: Tensors, tokens: list[Int32], present: list[Int32], first: Int32, more: Int32):
        """Four features of ``tokens``, as far as these are ``present``, from ``first + more`` on. What the loads of one
        wait for, the others' do not."""
        top_k, feature = Int32(tensors.indices.shape[1]), first + more
        if (more < self.c.rows) & (feature < Int32(tensors.out.shape[1])):
            sums = [[Float32(0.0)] * 4 for _ in tokens]
            for k in cutlass.range(0, top_k, _IN_FLIGHT, unroll=1):
                at = [cutlass.min(k + i, top_k - 1) for i in range(_IN_FLIGHT)]
                choices = [[chosen(tensors, token, j) for j in at] for token in tokens]
                values = []
                for n, token in enumerate(tokens):
                    for i in cutlass.range_constexpr(_IN_FLIGHT):
                        row = Int64(token * top_k + at[i]) * tensors.partial.stride[0]
                        known = (k + i < top_k) & (choices[n][i] >= 0) & (present[n] != 0)
                        source = tensors.partial.iterator.toint() + (row + feature) * 4
                        valid = cutlass.select_(known, Int32(1), Int32(0))
                        values.append(memory_ops.load_4_floats_if(source, valid))
                for n in cutlass.range_constexpr(len(tokens)):
                    for i in cutlass.range_constexpr(_IN_FLIGHT):
                        new = values[n * _IN_FLIGHT + i]
                        sums[n] = [s + v for s, v in zip(sums[n], new, strict=True)]
            for n, token in enumerate(tokens):
                pairs = [op.pack(tensors.out.element_type, *sums[n][i : i + 2]) for i in (0, 2)]
                if present[n] != 0:
                    to = Int64(token) * tensors.out.stride[0] + feature
                    op.store_2_pairs(tensors.out.iterator.toint() + to * 2, *pairs)
