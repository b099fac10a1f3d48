"""A tile's keys in splits, one for each of several CTAs: which of its blocks a split visits, where its results go.

The results of a split are those of attention over its keys alone, in float32, with the split as first axis: a second
launch combines them by their LSE. Splits are equal parts of the blocks that a tile visits, so that they follow the
lengths on the device, and every key is read once for a tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..key_blocks import KeyBlocks
from ..types import Outputs
from .types import Config, WorkTile


def blocks_of_split(blocks: KeyBlocks, split: Int32, num_splits: Int32) -> KeyBlocks:
    """The blocks of one split. There are no steps where there are fewer blocks than splits: it must not be computed."""
    first = split * blocks.steps // num_splits
    steps = (split + 1) * blocks.steps // num_splits - first
    full = cutlass.min(cutlass.max(blocks.full - first, Int32(1)), steps)
    return KeyBlocks(
        last=blocks.last - first,
        near=blocks.near - first,  # below 0 behind the first sink block
        sinks_last=blocks.sinks_last,
        full=full,
        full_end=cutlass.min(cutlass.max(blocks.full_end - first, full), steps),
        steps=steps,
    )


def output_batch(c: Config, tile: WorkTile, sequences: Int32) -> Int32:
    """The index along the first axis of the outputs."""
    return tile.split * sequences + tile.batch if c.split else tile.batch


@cute.jit
def has_keys(c: cutlass.Constexpr, outs: Outputs, tile: WorkTile, blocks: KeyBlocks, sequences: Int32) -> Boolean:
    """Whether a split has blocks. If not, the calling warp notes for its queries that they have seen nothing."""
    if blocks.steps == 0:
        first, rows = tile.row * c.rows, c.rows * c.group
        for row in cutlass.range(cute.arch.lane_idx(), rows, 32, unroll=1):
            token = first + row // c.group
            if token < tile.tokens:
                outs.lse[output_batch(c, tile, sequences), token, tile.head * c.group + row % c.group] = -Float32.inf
    return blocks.steps > 0
