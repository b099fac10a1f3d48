"""Which keys a block of a decode launch attends: equal shares of all tiles of all sequences. Imports cutlass.

The lengths are on the device, so every block works its share out for itself: it sums the tiles of all sequences, cuts
the sum into equal runs and finds the sequence in which its own run starts. A run may end inside a sequence; then the
blocks that share a sequence merge (``decode.py``). No block has more than one tile more than another, whatever the
lengths. Words: a *group* is one KV head of one sequence (and up to 64 query heads), a *tile* some keys of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

_ALL = 32


class Lengths(NamedTuple):
    """What decides which keys a sequence attends."""

    kv_len: cute.Tensor  # (B)
    kv_start: cute.Tensor  # (B), not read unless has_start
    batch: Int32
    size: Int32  # keys that the cache has room for; lengths and starts are clamped to it
    window: Int32  # -1: none
    sink_tokens: Int32
    has_start: Int32
    by_group: Int32  # whether a group is one unit of work, else every tile is one


class Visible(NamedTuple):
    """The keys of one sequence: [start, sinks_end) in ``sink_tiles`` tiles and [low, end) in the others."""

    start: Int32
    sinks_end: Int32
    low: Int32
    end: Int32
    sink_tiles: Int32
    tiles: Int32  # of both, at least 1: a sequence without keys still writes its result
    units: Int32  # of work


class Share(NamedTuple):
    """How ``total`` units of work are cut among ``blocks`` blocks: block i starts at i * total / blocks."""

    total: Int32
    blocks: Int32
    each: Int32  # total / blocks, rounded down
    extra: Int32  # and what is left

    def start(self, block: Any) -> Any:
        return block * self.each + block * self.extra // self.blocks

    def owner(self, unit: Any) -> Any:
        """The block that has a unit: a guess in floats, which is off by one at most, put right."""
        block = Int32(cutlass.Float32(unit) * (cutlass.Float32(self.blocks) / cutlass.Float32(self.total)))
        for _ in range(2):
            block -= cutlass.select_(self.start(block) > unit, Int32(1), Int32(0))
        for _ in range(2):
            block += cutlass.select_(self.start(block + 1) <= unit, Int32(1), Int32(0))
        return block


@cute.jit
def visible(lengths: Lengths, b: Int32, tile: cutlass.Constexpr):
    """The keys that sequence ``b`` attends, in tiles that start at multiples of ``tile``."""
    zero = Int32(0)
    end = cutlass.min(cutlass.max(lengths.kv_len[b], zero), lengths.size)
    start = zero
    if lengths.has_start != 0:
        start = cutlass.min(cutlass.max(lengths.kv_start[b], zero), lengths.size)
    low, sinks_end = start, start
    if lengths.window >= 0:
        low = cutlass.max(start, end - lengths.window)
        sinks_end = cutlass.max(start, cutlass.min(start + lengths.sink_tokens, cutlass.min(low, end)))
    sink_tiles = (sinks_end + (tile - 1)) // tile - start // tile
    sink_tiles = cutlass.select_(sinks_end > start, sink_tiles, zero)
    near = (end + (tile - 1)) // tile - low // tile
    near = cutlass.select_(end > low, near, zero)
    tiles = cutlass.max(sink_tiles + near, 1)
    units = cutlass.select_(lengths.by_group != 0, Int32(1), tiles)
    return Visible(start, sinks_end, low, cutlass.max(low, end), sink_tiles, tiles, units)


def place(keys: Visible, t: Any, tile: int) -> tuple[Any, Any, Any]:
    """Tile ``t``: its first key, and the bounds [low, high) of the keys that count."""
    near = t >= keys.sink_tiles
    first = cutlass.select_(near, keys.low // tile + t - keys.sink_tiles, keys.start // tile + t) * tile
    return first, cutlass.select_(near, keys.low, keys.start), cutlass.select_(near, keys.end, keys.sinks_end)


@cute.jit
def share(lengths: Lengths, heads: Int32, blocks: Int32, least: Int32, tile: cutlass.Constexpr):
    """Cut the work of all groups among at most ``blocks`` blocks; none has less than ``least`` units if there are more.

    Where all groups are equally long and it idles no more than a 16th of the blocks, cuts fall between groups, or
    groups are cut evenly: fewer parts to merge, and no block that ends one group and begins another.
    """
    lane = cute.arch.lane_idx()
    units, longest = lengths.batch, Int32(1)
    if lengths.by_group == 0:
        units, longest = Int32(0), Int32(0)
        for first in cutlass.range(0, lengths.batch, _ALL, unroll=1):
            b = first + lane
            if b < lengths.batch:
                mine = visible(lengths, b, tile).units
                units += mine
                longest = cutlass.max(longest, mine)
        for step in cutlass.range_constexpr(5):
            units += cute.arch.shuffle_sync_bfly(units, 1 << step)
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << step))
    total = units * heads
    blocks = cutlass.max(cutlass.min(blocks, total // least), 1)
    if units == longest * lengths.batch:
        groups = heads * lengths.batch
        even = blocks // groups * groups
        if groups > blocks:
            rounds = (groups + blocks - 1) // blocks
            even = (groups + rounds - 1) // rounds
        if even * 16 >= blocks * 15:
            blocks = even
    each = total // blocks
    return Share(total, blocks, each, total - each * blocks)


@cute.jit
def find(lengths: Lengths, heads: Int32, wanted: Int32, tile: cutlass.Constexpr):
    """The sequence that has unit ``wanted`` of the launch, and how many units come before the sequence."""
    lane = cute.arch.lane_idx()
    sequence, before, passed, first, found = Int32(0), Int32(0), Int32(0), Int32(0), lengths.by_group
    if lengths.by_group != 0:
        sequence = wanted // heads
        before = sequence * heads
    while (found == 0) & (first < lengths.batch):
        b = first + lane
        mine = Int32(0)
        if b < lengths.batch:
            mine = visible(lengths, b, tile).units * heads
        upto = mine
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << step)
            upto += cutlass.select_(lane >= (1 << step), below, Int32(0))
        hit = cute.arch.vote_ballot_sync(passed + upto > wanted)
        # The lowest lane that is past ``wanted``: the lanes below it have zeros in ``hit``.
        at = cute.arch.popc(~hit & (hit - 1))
        if hit != 0:
            before = passed + cute.arch.shuffle_sync(upto - mine, at)
            sequence = first + at
            found = Int32(1)
        passed += cute.arch.shuffle_sync(upto, _ALL - 1)
        first += _ALL
    return sequence, before


@cute.jit
def units_before(lengths: Lengths, heads: Int32, sequence: Int32, tile: cutlass.Constexpr):
    """How many units of work come before a sequence; ``find`` the other way round. A whole warp calls this."""
    lane = cute.arch.lane_idx()
    units = Int32(0)
    for first in cutlass.range(0, sequence, _ALL, unroll=1):
        b = first + lane
        if b < sequence:
            units += visible(lengths, b, tile).units
    for step in cutlass.range_constexpr(5):
        units += cute.arch.shuffle_sync_bfly(units, 1 << step)
    return units * heads
