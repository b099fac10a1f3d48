"""Work tiles: the tokens of one expert, as many as a product takes, times some rows of its weights. Imports cutlass."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_attnkit.cuda import memory_ops

from .arguments import Tensors
from .config import Config


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
