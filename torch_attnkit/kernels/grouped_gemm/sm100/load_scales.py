"""Block scales of a stage, from rows of either layout to tiles of tensor memory (``cuda/sm100/block_scaled.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Ring
from torch_attnkit.cuda.sm100 import block_scaled

from ..arguments import Flags, Matrices
from ..weight_scales import WeightScales
from ..work_tiles import WorkTile
from .cluster import Cluster
from .config import FEATURES, SCALE_WARPS, STAGES_AHEAD, WEIGHT_ROWS, Config, QuantizedRow


@dataclass(frozen=True)
class ScaleRows:
    """Rows of a lane, 32 of them in a warp, for ``WeightScales``, which reads rows of scales of either layout."""

    scales: int
    block: int
    scale_vector: int
    rows: int = 32


class ScaleLoader:
    """``SCALE_WARPS`` warps: a lane has a row of tokens and one of each row tile of weights. Rows of tokens that a tile
    does not have get zeros; rows of weights beyond the last repeat it: their results are not used."""

    def __init__(self, config: Config):
        self.c = config
        self.weights = WeightScales(ScaleRows(config.scales, config.block, config.scale_vector, 32 * config.row_tiles))
        self.words = config.scales // 4

    @cute.jit
    def run(
        self, tensors: Any, flags: Flags, weights: Matrices, rows: cute.Tensor, share: Any, k_tiles: Int32, ring: Ring,
        shared: Int32, part: Int32,
    ):  # fmt: skip
        """``shared``: the first stage's scales, those of tokens and then those of weights."""
        c, lane = self.c, cute.arch.lane_idx()
        row = part * 32 + lane
        offset = shared + lane * 16 + part * 4
        packed = QuantizedRow(Int32(weights.packed.shape[2]) * 2, c.activations).code_bytes
        n = Int32(0)
        for tile_idx in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, tile_idx)
            starts = [row_scales(c, flags, weights, row_tile(c, tile, i), row) for i in range(c.row_tiles)]
            line = rows.iterator.toint() + Int64(tile.first + row) * rows.stride[0] * 2 + packed
            for first in cutlass.range(0, k_tiles, STAGES_AHEAD, unroll=1):
                of_tokens = copies.fragments(STAGES_AHEAD, self.words, Uint32)
                of_weights = [copies.fragments(c.row_tiles, self.words, Uint32) for _ in range(STAGES_AHEAD)]
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    if first + i < k_tiles:
                        self._read(flags, weights, tile, starts, first + i, of_weights[i])
                        of_tokens[i].fill(0)
                        if row < tile.columns:
                            at = line + (first + i) * c.scales
                            source = cute.make_ptr(Uint32, at, cute.AddressSpace.gmem, assumed_align=min(c.scales, 8))
                            copies.load(source, of_tokens[i])
                for i in cutlass.range_constexpr(STAGES_AHEAD):
                    if first + i < k_tiles:
                        self._store(of_tokens[i], of_weights[i], ring, n + first + i, offset)
            n += k_tiles

    def _read(
        self, flags: Flags, weights: Matrices, tile: WorkTile, starts: list[Any], k: Int32, rS: list[cute.Tensor]
    ) -> None:
        for target, words in zip(rS, self.weights.read(flags, weights, tile, starts, k), strict=True):
            target.store(words.load())

    @cute.jit
    def _store(self, tokens: cute.Tensor, weights: list[cute.Tensor], ring: Ring, fill: Int32, offset: Int32):
        full = ring.await_empty(fill)
        at = offset + ring.slot(fill) * self.c.stage_scales
        for i, words in enumerate([tokens, *weights]):
            for j in range(self.words):
                to = at + i * self.c.scale_bytes + j * block_scaled.TILE_BYTES
                pointer = cute.make_ptr(Uint32, to, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = words[j]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            Cluster(self.c).arrive(full)


def row_tile(config: Config, tile: WorkTile, i: int | Int32) -> WorkTile:
    """The i-th of a work tile, which may lie beyond the last row."""
    return tile._replace(row=tile.row * config.row_tiles + i)


@cute.jit
def row_scales(config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, row: Int32):
    """Address of the scales of a row of the row tile; in the 128x4 layout the offset from those of its expert."""
    line, scale = weight_row(config, flags, weights, tile, row), weights.scale
    start = Int64(line >> 7) * (Int32(scale.shape[2]) * 128) + ((line & 31) << 4) + ((line >> 5 & 3) << 2)
    if flags.swizzled == 0:
        start = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0] + Int64(line) * scale.stride[1]
    return start


def weight_row(config: Config, flags: Flags, weights: Matrices, tile: WorkTile, row: Int32) -> Int32:
    """The row of an expert's weights at ``row`` of a row tile; the last one for those beyond it."""
    rows = Int32(weights.packed.shape[1])
    if const_expr(not config.paired):
        return cutlass.min(tile.row * WEIGHT_ROWS + row, rows - 1)
    half, up = rows >> 1, cutlass.select_(row >= FEATURES, Int32(1), Int32(0))
    feature = cutlass.min(tile.row * FEATURES + row - up * FEATURES, half - 1)
    return cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * half)


assert SCALE_WARPS * 32 == WEIGHT_ROWS
