"""Epilogues of the block-scaled grouped GEMM: h = SwiGLU, quantised; or the second GEMM's results.

A lane's sums are those of tokens g and g + 8 and of two neighbouring rows of weights. Of the first GEMM eight rows of
gate and eight of up take turns, so a lane has both of a feature; a quad has a token, and a warp 32 features of it:
whole blocks. Bytes of codes are exchanged within a quad, so that each lane stores a word: of FP4 eight features, of
E4M3 every other one of them, and the others in a second word.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr

from torch_attnkit.cuda import copies, fp4
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.sm100.e2m1 import amax, e2m1_pairs
from torch_attnkit.cuda.warp_ops import pack_e4m3

from ..arguments import Flags, Matrices, Scalars, Tensors, global_scale_of
from ..sm100.config import BITS, FEATURES, RESULT_WARPS, WEIGHT_ROWS, QuantizedRow
from ..sm100.swiglu_quantize import plain, swiglu
from ..sm100.topk_reduce import TopkReduce
from ..work_tiles import WorkTile
from .config import Config

_GROUPS = 4  # of eight features, that a warp has


def token_of(config: Config, m: int, half: int) -> Int32:
    """Of a work tile, that the lane has in tile m of 16."""
    warp = cute.arch.warp_idx() & (config.warps[0] - 1)
    return warp * (16 * config.m_tiles) + 16 * m + 8 * half + (cute.arch.lane_idx() >> 2)


def first_of_warp(config: Config, each: int) -> Int32:
    """Of the warp's rows or features, of which every warp along them has ``each``."""
    return (cute.arch.warp_idx() >> config.warps[0].bit_length() - 1) * each


@cute.jit
def bias_of(flags: Flags, weights: Matrices, expert: Int32, row: Int32):
    """Of a row of weights, zero without."""
    found = Float32(0.0)
    if flags.bias != 0:
        found = Float32(weights.bias[expert, cutlass.min(row, Int32(weights.packed.shape[1]) - 1)])
    return found


class SwigluEpilogue:
    """h = swiglu(gate, up) of a work tile, as ``QuantizedRow`` has rows."""

    def __init__(self, config: Config):
        self.c = config
        self.scale_kind = Uint16 if config.format == "nvfp4" else Uint8  # of a warp's features of a token

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32):
        if plain(scalars):
            self._rows(tensors, scalars, rSum, tile, factor, True)
        else:
            self._rows(tensors, scalars, rSum, tile, factor, False)

    @cute.jit
    def _rows(
        self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32,
        simple: cutlass.Constexpr,
    ):  # fmt: skip
        lane, features = cute.arch.lane_idx(), Int32(tensors.up.packed.shape[1]) >> 1
        base = tile.row * FEATURES + first_of_warp(self.c, 8 * _GROUPS)
        bias = self._biases(tensors, scalars, tile, base)
        global_scale = global_scale_of(scalars.down, tensors.down)
        behind = QuantizedRow(features, self.c.activations).code_bytes
        bits = const_expr(BITS[self.c.activations])
        for m in cutlass.range_constexpr(self.c.m_tiles):
            for half in cutlass.range_constexpr(2):
                h = []
                for group in cutlass.range_constexpr(_GROUPS):
                    gate, up = (
                        tuple(rSum[2 * half + j, 2 * group + part, m] * factor + of[2 * group + j] for j in range(2))
                        for part, of in enumerate(bias)
                    )
                    h += [*swiglu(scalars, gate, up, simple)]
                words, scales = self._quantized(h, global_scale)
                token = token_of(self.c, m, half)
                row = tensors.h.iterator.toint() + Int64(tile.first + token) * tensors.h.stride[0] * 2
                if token < tile.columns:
                    if base < features:
                        for i, word in enumerate(words):
                            copies.store_words(row + base * bits // 8 + 16 * i + (lane & 3) * 4, [word])
                    # Behind the last feature scales are zero, as far as a word of them reaches.
                    if (lane & 3) == 0:
                        some = Int32(cutlass.select_(base < features, scales, Int32(0)))
                        self._store_scales(row + behind, base, some)

    @cute.jit
    def _biases(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, base: Int32):
        """Of gate and of up, of the lane's eight features."""
        flags, rows = scalars.up, Int32(tensors.up.packed.shape[1])
        found: tuple[list[Float32], list[Float32]] = ([], [])
        for group in cutlass.range_constexpr(_GROUPS):
            for j in cutlass.range_constexpr(2):
                feature = base + 8 * group + (cute.arch.lane_idx() & 3) * 2 + j
                for part in cutlass.range_constexpr(2):
                    apart = feature + part * (rows >> 1)
                    row = cutlass.select_(flags.interleaved != 0, 2 * feature + part, apart)
                    found[part].append(bias_of(flags, tensors.up, tile.expert, Int32(row)))
        return found

    def _quantized(self, h: list[Float32], global_scale: Float32) -> tuple[list[Int32], Int32]:
        """The words of codes that the lane stores, and the scales of the warp's features, a byte each."""
        count = self.c.block // 4  # of the lane, in a block
        scaled: list[Any] = []
        scales = Int32(0)
        for i in range(0, len(h), count):
            top = _quad_max(amax(h[i : i + count]))
            if self.c.format == "nvfp4":
                byte, scale = fp4.nvfp4_scale(top, global_scale)
                factor = fp4.nvfp4_factor(scale, global_scale)
            else:
                byte, _ = fp4.mxfp8_scale(top) if self.c.activations == "mxfp8" else fp4.mxfp4_scale(top)
                factor = fp4.ue8m0_reciprocal(byte)
            scaled += [fp4.times(x, factor) for x in h[i : i + count]]
            scales = scales | (byte << (8 * (i // count)))
        if self.c.activations == "mxfp8":
            return [_transposed(pack_e4m3(scaled[i::2])) for i in range(2)], scales
        return [_transposed(e2m1_pairs(scaled))], scales

    def _store_scales(self, row: Int64, base: Int32, scales: Int32) -> None:
        """``row``: the address of a row's scales."""
        at = row + base // self.c.block
        target = cute.make_ptr(self.scale_kind, at, cute.AddressSpace.gmem, assumed_align=self.scale_kind.width // 8)
        cute.make_tensor(target, cute.make_layout(1))[0] = self.scale_kind(scales)


def _quad_max(x: Float32) -> Float32:
    """Over the lanes that have a token."""
    for distance in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, distance))
    return x


def _transposed(word: Int32) -> Int32:
    """Lane t of a quad gets byte t of all four, in their order."""
    lane = cute.arch.lane_idx()
    other = cute.arch.shuffle_sync_bfly(word, 1)
    even = (lane & 1) == 0
    pairs = permute_bytes(word, other, Int32(cutlass.select_(even, Int32(0x6240), Int32(0x3715))))
    other = cute.arch.shuffle_sync_bfly(pairs, 2)
    low = (lane & 2) == 0
    return permute_bytes(pairs, other, Int32(cutlass.select_(low, Int32(0x5410), Int32(0x3276))))


class StoreEpilogue:
    """y of a work tile, in float32 and in the order of ``h``; then the top-k reduction."""

    def __init__(self, config: Config):
        self.c = config
        self.reduce = TopkReduce(WEIGHT_ROWS, completed=True, any_warp=True)

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, rSum: cute.Tensor, tile: WorkTile, factor: Float32):
        features = Int32(tensors.down.packed.shape[1])
        base = tile.row * WEIGHT_ROWS + first_of_warp(self.c, 8 * self.c.n_tiles) + (cute.arch.lane_idx() & 3) * 2
        for n in cutlass.range_constexpr(self.c.n_tiles):
            feature = base + 8 * n
            bias = [bias_of(scalars.down, tensors.down, tile.expert, feature + j) for j in range(2)]
            for m in cutlass.range_constexpr(self.c.m_tiles):
                for half in cutlass.range_constexpr(2):
                    token = token_of(self.c, m, half)
                    if (token < tile.columns) & (feature < features):
                        rY = cute.make_rmem_tensor(2, Float32)
                        for j in cutlass.range_constexpr(2):
                            rY[j] = rSum[2 * half + j, n, m] * factor + bias[j]
                        at = Int64(tile.first + token) * tensors.partial.stride[0] + feature
                        copies.store(rY, tensors.partial.iterator + at)
        cute.arch.barrier()  # all results of the tile are written
        warp = cute.arch.warp_idx()
        if warp < RESULT_WARPS:
            self.reduce.run(tensors, scalars, tile, warp)
