"""A tile's keys in shares, one for each of several CTAs: what of its blocks a share visits, and where its results go.

The results of a share are those of attention over its keys alone, in float32, with the share as first axis: a second
launch weighs them by their LSE. Shares are equal parts of the blocks that a tile visits, so that they follow the
lengths on the device, and every key is read once for a tile. Imports cutlass.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..prefill_tiles import Blocks
from ..prefill_types import Outputs
from .prefill_types import Config, Tile


def of_share(blocks: Blocks, part: Int32, parts: Int32) -> Blocks:
    """The visit of one share. It has no steps where there are fewer blocks than parts, and then must not be made."""
    first = part * blocks.steps // parts
    steps = (part + 1) * blocks.steps // parts - first
    full = cutlass.min(cutlass.max(blocks.full - first, Int32(1)), steps)
    return Blocks(
        last=blocks.last - first,
        near=blocks.near - first,  # below 0 behind the first sink block
        sinks_last=blocks.sinks_last,
        full=full,
        full_end=cutlass.min(cutlass.max(blocks.full_end - first, full), steps),
        steps=steps,
    )


def place_of(c: Config, tile: Tile, sequences: Int32) -> Int32:
    """Along the first axis of the outputs."""
    return tile.part * sequences + tile.batch if c.split else tile.batch


@cute.jit
def has_keys(c: cutlass.Constexpr, outs: Outputs, tile: Tile, blocks: Blocks, sequences: Int32) -> Boolean:
    """Whether a share has blocks. If not, the calling warp notes for its queries that they have seen nothing."""
    if blocks.steps == 0:
        first, rows = tile.row * c.rows, c.rows * c.group
        for row in cutlass.range(cute.arch.lane_idx(), rows, 32, unroll=1):
            token = first + row // c.group
            if token < tile.tokens:
                outs.lse[place_of(c, tile, sequences), token, tile.head * c.group + row % c.group] = -Float32.inf
    return blocks.steps > 0
