"""Work tiles: the tokens of one expert, as many as a product takes, times some rows of its weights. Imports cutlass."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda.ring import Fixed, Ring

from .arguments import Tensors, chosen
from .config import MOST_COLUMNS, TILES, Config


class WorkTile(NamedTuple):
    expert: Int32
    first: Int32  # place of its first token in the order of experts
    columns: Int32  # tokens
    row: Int32  # number of its rows' tile


def width_of(config: Config, columns: Int32) -> Int32:
    """Tokens that are multiplied where a work tile has ``columns``: those beyond are zeros."""
    room = Int32(8 * config.widths[-1])
    for width in reversed(config.widths[:-1]):
        room = cutlass.select_(columns <= 8 * width, Int32(8 * width), room)
    return room


class Work(NamedTuple):
    """A block's share: every ``blocks``-th tile, of which those of an expert follow each other."""

    block: Int32
    blocks: Int32
    row_tiles: Int32
    count: Int32

    def tile(self, tensors: Tensors, turn: Int32) -> WorkTile:
        unit = self.block + turn * self.blocks
        line = 1 + unit // self.row_tiles
        expert, first, columns = (tensors.tiles[line, i] for i in range(3))
        return WorkTile(expert, first, columns, unit % self.row_tiles)

    def prefetch(self, tensors: Tensors, turn: Int32) -> None:
        """Bring what ``tile`` reads near; beyond the last turn, the last's."""
        unit = self.block + cutlass.min(turn, self.count - 1) * self.blocks
        memory_ops.prefetch(tensors.tiles.iterator.toint() + Int64(1 + unit // self.row_tiles) * 16)


def work(tensors: Tensors, row_tiles: Int32) -> Work:
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    units = tensors.tiles[0, 0] * row_tiles
    count = cutlass.max((units - block + blocks - 1) // blocks, Int32(0))
    return Work(block, blocks, row_tiles, count)


_HEADER = 8  # words of a work tile in shared memory before those of its tokens
_AT_ONCE = 8  # of a token's choices that a lane has on their way
_FACTOR = len(WorkTile._fields)
assert MOST_COLUMNS == 32  # a lane each


class Tiles(Fixed):
    """Work tiles and what is asked for each of their tokens, in a ring of shared memory that one warp writes ahead."""

    def __init__(self, ring: Ring, memory: Any):
        self.ring = ring
        words = cute.make_layout((_HEADER + 3 * MOST_COLUMNS, TILES), stride=(1, _HEADER + 3 * MOST_COLUMNS))
        self.sWords = memory.allocate_tensor(Int32, words, 16)

    @cute.jit
    def publish(self, tensors: Tensors, turn: Int32, tile: WorkTile, factor: Float32, combined: cutlass.Constexpr):
        """``factor``: what sums have to be multiplied by. Where tokens' results are ``combined``, their weights and how
        many there are of a token go with them."""
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        slot, weight, choices = Int32(0), Float32(0.0), Int32(0)
        if lane < tile.columns:
            slot = tensors.order[tile.first + lane]
            if const_expr(combined):
                weight = tensors.weights[slot // top_k, slot % top_k]
                for k in cutlass.range(0, top_k, _AT_ONCE, unroll=1):
                    some = [chosen(tensors, slot // top_k, cutlass.min(k + i, top_k - 1)) for i in range(_AT_ONCE)]
                    for i in cutlass.range_constexpr(_AT_ONCE):
                        choices += cutlass.select_((k + i < top_k) & (some[i] >= 0), Int32(1), Int32(0))
        full, place = self.ring.await_empty(turn), self.ring.slot(turn)
        if lane == 0:
            for i, word in enumerate((*tile, factor.bitcast(Int32))):
                self.sWords[i, place] = word
        self.sWords[_HEADER + lane, place] = slot
        if const_expr(combined):
            self.sWords[_HEADER + MOST_COLUMNS + lane, place] = weight.bitcast(Int32)
            self.sWords[_HEADER + 2 * MOST_COLUMNS + lane, place] = choices
        cute.arch.sync_warp()  # orders the warp's stores before the arrival
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    def wait(self, turn: Int32) -> WorkTile:
        self.ring.wait(turn)
        return WorkTile(*(self.sWords[i, self.ring.slot(turn)] for i in range(_FACTOR)))

    def release(self, turn: Int32) -> None:
        self.ring.release(turn)

    def factor(self, turn: Int32) -> Float32:
        return self.sWords[_FACTOR, self.ring.slot(turn)].bitcast(Float32)

    def slot(self, turn: Int32, column: Int32) -> Int32:
        return self.sWords[_HEADER + column, self.ring.slot(turn)]

    def weight(self, turn: Int32, column: Int32) -> Float32:
        return self.sWords[_HEADER + MOST_COLUMNS + column, self.ring.slot(turn)].bitcast(Float32)

    def choices(self, turn: Int32, column: Int32) -> Int32:
        """How many results a token has."""
        return self.sWords[_HEADER + 2 * MOST_COLUMNS + column, self.ring.slot(turn)]
