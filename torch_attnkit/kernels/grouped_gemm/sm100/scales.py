"""Scales of a stage, from rows of either layout to the tiles that tensor memory takes (``cuda/sm100/block_scaled.py``).
Imports cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Ring
from torch_attnkit.cuda.sm100 import block_scaled

from ..sm90.arguments import Flags, Matrices
from ..sm90.factors import Factors
from ..sm90.schedule import WorkTile
from .config import FEATURES, SCALE_WARPS, STAGE, STAGES_AHEAD, STEP, WEIGHT_ROWS, Config


@dataclass(frozen=True)
class Row:
    """One row of a lane, for ``Factors``, which reads rows of scales of either layout."""

    scales: int
    block: int
    scale_vector: int
    rows: int = 32


class Scales:
    """``SCALE_WARPS`` warps: a lane has a row of tokens and one of weights. Rows of tokens that a work tile does not
    have get zeros, and those of weights beyond the last the last one's: nobody looks at what they give."""

    def __init__(self, config: Config):
        self.c, self.weights = config, Factors(Row(config.scales, config.block, config.scale_vector))
        self.words = config.scales // 4

    @cute.jit
    def run(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, share: Any, turns: Int32, ring: Ring,
        shared: Int32, part: Int32,
    ):  # fmt: skip
        """``shared``: the first stage's scales, those of tokens and then those of weights."""
        c, lane = self.c, cute.arch.lane_idx()
        row = part * 32 + lane
        place = shared + lane * 16 + part * 4
        codes = (Int32(weights.codes.shape[2]) * 2 + STEP - 1) // STEP * (STEP // 2)
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            start = row_scales(c, flags, weights, tile, row)
            line = rows.iterator.toint() + Int64(tile.first + row) * rows.stride[0] * 2 + codes
            for first in cutlass.range(0, turns, STAGES_AHEAD, unroll=1):
                of_tokens = copies.fragments(STAGES_AHEAD, self.words, Uint32)
                of_weights = []
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    k = cutlass.min(first + i, turns - 1)
                    of_weights += self.weights.read(flags, weights, tile, [start], k)
                    of_tokens[i].fill(0)
                    if row < tile.columns:
                        source = cute.make_ptr(Uint32, line + k * c.scales, cute.AddressSpace.gmem, assumed_align=8)
                        copies.load(source, of_tokens[i])
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    if first + i < turns:
                        self._store(of_tokens[i], of_weights[i], ring, n + first + i, place)
            n += turns

    @cute.jit
    def _store(self, tokens: cute.Tensor, weights: cute.Tensor, ring: Ring, fill: Int32, place: Int32):
        full = ring.await_empty(fill)
        at = place + ring.slot(fill) * (2 * self.c.scale_bytes)
        for words, begin in ((tokens, 0), (weights, self.c.scale_bytes)):
            for j in range(self.words):
                to = at + begin + j * block_scaled.TILE_BYTES
                pointer = cute.make_ptr(Uint32, to, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = words[j]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)


@cute.jit
def row_scales(config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, row: Int32):
    """Where the scales of a row of the work tile begin, in tiles of 128x4 from those of its expert on."""
    line, scale = weight_row(config, flags, weights, tile, row), weights.scale
    start = Int64(line // 128) * (Int32(scale.shape[2]) * 128) + line % 32 * 16 + line % 128 // 32 * 4
    if flags.swizzled == 0:
        start = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0] + Int64(line) * scale.stride[1]
    return start


def weight_row(config: Config, flags: Flags, weights: Matrices, tile: WorkTile, row: Int32) -> Int32:
    """Which row of an expert's weights is a work tile's ``row``; the last one for those beyond it."""
    rows = Int32(weights.codes.shape[1])
    if const_expr(not config.paired):
        return cutlass.min(tile.row * WEIGHT_ROWS + row, rows - 1)
    feature, up = cutlass.min(tile.row * FEATURES + row % FEATURES, rows // 2 - 1), row // FEATURES
    return cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * (rows // 2))


assert SCALE_WARPS * 32 == WEIGHT_ROWS and STAGE % STEP == 0
