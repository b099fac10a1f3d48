"""The scheduler of persistent CTAs: equal runs of the blocks of keys of all sequences, whatever their lengths.

As in decode (``kernels/decode/schedule.py``), the lengths are on the device and every CTA works its run out for itself:
it sums the blocks that all work tiles visit, cuts the sum into equal runs, and finds where its own begins. A work tile
that a cut goes through is split, and joined by the CTAs that have its parts. Work tiles are in the order of sequences,
of a sequence in the order of rows, of the same rows in the order of KV heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.stream_k import Partition, quotient
from torch_attnkit.cuda.warp_scan import most, total, up_to_lane

from ..blocks import KeyBlocks, Sequence
from .multi_blocks import MaskRules, WorkTile, row_tile

_LANES = 32
_LEAST = 2  # blocks of a run, if there are more: a split of one is written and read again for what it took to compute


class Sequences(Protocol):
    """Where a kernel's sequences are."""

    def count(self, ins: Any) -> Int32: ...
    def kv_heads(self, ins: Any) -> Int32: ...
    def group(self, ins: Any) -> tuple: ...  # query heads that share a KV head, and 1 over that
    def sequence(self, ins: Any, scalars: Any, b: Int32) -> Sequence: ...
    def batch(self, b: Int32) -> Int32: ...  # its place in the tensors that a work tile's rows are read from
    @property
    def one_tile(self) -> bool: ...  # whether each has one tile of rows, by the plan of persistent CTAs
    # Where a cluster has one work tile: how many clusters, and this CTA's, the number of its sequence, whether there is
    # one.
    def clusters(self, ins: Any) -> Int32: ...
    def work_tile(self, ins: Any, scalars: Any) -> tuple[WorkTile, Int32, Any]: ...


class Run(NamedTuple):
    """The units [at, stop) of a CTA. A work tile has a unit for each step, or one if it has no keys, and ahead of them
    ``extra`` for its start and end."""

    cut: Partition
    extra: Int32
    at: Int32
    stop: Int32
    sequence: Int32  # that unit ``at`` belongs to, or one before it that has no rows
    before: Int32  # units before that sequence


class Part(NamedTuple):
    """Of a run: a work tile, or a split of it."""

    tile: WorkTile
    sequence: Int32
    number: Int32  # of the tile in its sequence
    ctas: Int32  # that have a part of the tile; 1: all of it is here, 0: this is none
    first: Int32  # of them
    early: Int32  # 1 where that had another part before, else 0

    def note(self) -> list[Int32]:
        """Without what ``of`` is told."""
        t = self.tile
        return [*self[1:], t.batch, t.kv_head, t.token, t.head, t.rows, t.first, t.stop, *t.seq, *t.blocks]

    @classmethod
    def of(cls, note: list[Int32], group: tuple) -> Part:
        """From ``NOTE`` numbers."""
        batch, kv_head, token, head, rows, first, stop = note[5:12]
        seq, blocks = Sequence(*note[12:17]), KeyBlocks(*note[17:])
        tile = WorkTile(batch, kv_head, *group, token, head, rows, seq, blocks, first, stop)
        return cls(tile, *note[:5])


NOTE = 12 + len(Sequence._fields) + len(KeyBlocks._fields)


class Scheduler(Fixed):
    def __init__(self, config: Any, sequences: Sequences):
        self.c, self.sequences = config, sequences

    def _tile(self, ins: Any, scalars: Any, seq: Sequence, place: tuple, number: Int32) -> WorkTile:
        c, group = self.c, self.sequences.group(ins)
        return row_tile(c, seq, place, group, number * c.tile_m, c.tile_m, MaskRules.of(scalars))

    def _units(self, ins: Any, scalars: Any, seq: Sequence, number: Int32, extra: Int32 | int) -> Int32:
        zero = Int32(0)
        return cutlass.max(self._tile(ins, scalars, seq, (zero, zero), number).blocks.steps, Int32(1)) + extra

    def _tiles(self, ins: Any, seq: Sequence) -> Int32:
        if self.sequences.one_tile:
            return Int32(1)
        return quotient(seq.tokens * self.sequences.group(ins)[0] + (self.c.tile_m - 1), self.c.tile_m)

    @cute.jit
    def _units_of(self, ins: Any, scalars: Any, b: Int32, extra: Int32 | int):
        """Of one KV head of a sequence."""
        seq, units = self.sequences.sequence(ins, scalars, b), Int32(0)
        if const_expr(self.sequences.one_tile):
            units = self._units(ins, scalars, seq, units, extra)
        else:
            for number in cutlass.range(self._tiles(ins, seq), unroll=1):
                units += self._units(ins, scalars, seq, number, extra)
        return units

    @cute.jit
    def find(self, ins: Any, scalars: Any, start: Int32):
        """This CTA's run, where a work tile's start and end count as ``start`` units. A whole warp calls this.

        Where all sequences have one tile with as many blocks and it idles no more than a 16th of the CTAs, cuts fall
        between work tiles, or these are cut evenly.
        """
        lane, count, heads = cute.arch.lane_idx(), self.sequences.count(ins), self.sequences.kv_heads(ins)
        extra = start
        units, longest, tiles, filled, of_lane = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, count, _LANES, unroll=1):
            mine = Int32(0)
            if first + lane < count:
                mine = self._units_of(ins, scalars, first + lane, extra)
                tiles = cutlass.max(tiles, self._tiles(ins, self.sequences.sequence(ins, scalars, first + lane)))
            units += mine
            longest = cutlass.max(longest, mine)
            filled += cutlass.select_(mine > 0, Int32(1), Int32(0))
            of_lane = cutlass.select_(first == 0, mine, of_lane)
        units, filled, longest, tiles = total(units), total(filled), most(longest), most(tiles)
        ctas = cute.arch.grid_dim()[0]
        blocks = cutlass.max(cutlass.min(ctas, quotient(units * heads, _LEAST)), 1)
        if (units == longest * filled) & (tiles == 1):
            groups = heads * filled
            even = quotient(blocks, groups) * groups
            if groups > blocks:
                rounds = quotient(groups + blocks - 1, blocks)
                even = quotient(groups + rounds - 1, rounds)
            if even * 16 >= blocks * 15:
                blocks = even
                # Each part of a tile starts once: none has less to do than another.
                units -= filled * extra
                of_lane = cutlass.max(of_lane - extra, Int32(0))
                extra = Int32(0)
        all_units = units * heads
        each = quotient(all_units, blocks)
        cut, mine = Partition(all_units, blocks, each, all_units - each * blocks), cute.arch.block_idx()[0]
        at, stop = cut.start(mine), cut.start(mine + 1)
        if mine >= blocks:
            at = stop
        sequence, before = self._sequence_of(ins, scalars, at, extra, of_lane)
        return Run(cut, extra, at, stop, sequence, before)

    @cute.jit
    def _sequence_of(self, ins: Any, scalars: Any, wanted: Int32, extra: Int32, of_lane: Int32):
        """The sequence that has unit ``wanted`` of the launch, and how many units come before the sequence; ``of_lane``
        are those of the lane's among the first sequences."""
        lane, count, heads = cute.arch.lane_idx(), self.sequences.count(ins), self.sequences.kv_heads(ins)
        sequence, before, passed, first, found = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        while (found == 0) & (first < count):
            mine = of_lane
            if first > 0:
                mine = Int32(0)
                if first + lane < count:
                    mine = self._units_of(ins, scalars, first + lane, extra)
            upto = up_to_lane(mine * heads)
            past = cute.arch.vote_ballot_sync(passed + upto > wanted)
            if past != 0:
                lowest = cute.arch.popc(~past & (past - 1))
                before = passed + cute.arch.shuffle_sync(upto - mine * heads, lowest)
                sequence = first + lowest
                found = Int32(1)
            passed += cute.arch.shuffle_sync(upto, _LANES - 1)
            first += _LANES
        return sequence, before

    @cute.jit
    def part(self, ins: Any, scalars: Any, run: Run, at: Int32, sequence: Int32, before: Int32):
        """What a run has from unit ``at`` on, which is in ``sequence``, before which are ``before``, or later; then the
        unit behind it, and how many are before the part's sequence."""
        heads, cut, extra = self.sequences.kv_heads(ins), run.cut, run.extra
        units = self._units_of(ins, scalars, sequence, extra)
        while at >= before + units * heads:
            before += units * heads
            sequence += 1
            units = self._units_of(ins, scalars, sequence, extra)
        start, number = before, Int32(0)
        if const_expr(not self.sequences.one_tile):
            seq = self.sequences.sequence(ins, scalars, sequence)
            units = self._units(ins, scalars, seq, number, extra)
            while at >= start + heads * units:
                start += heads * units
                number += 1
                units = self._units(ins, scalars, seq, number, extra)
        kv_head = quotient(at - start, units)
        start += kv_head * units
        behind = cutlass.min(start + units, run.stop)
        tile = self.tile(ins, scalars, sequence, kv_head, number)
        blocks = start + extra  # the unit of the first
        stop = cutlass.max(cutlass.min(behind - blocks, tile.blocks.steps), Int32(0))
        tile = tile._replace(first=cutlass.max(at - blocks, Int32(0)), stop=stop)
        first = cut.owner(blocks)
        # One that has no more than what counts for the start has no part.
        ctas = cutlass.select_(behind > blocks, cut.owner(start + units - 1) - first + 1, Int32(0))
        early = cutlass.select_(cut.start(first) < start, Int32(1), Int32(0))
        return Part(tile, sequence, number, ctas, first, early), behind, before

    def tile(self, ins: Any, scalars: Any, sequence: Int32, kv_head: Int32, number: Int32) -> WorkTile:
        """All steps of a work tile."""
        seq = self.sequences.sequence(ins, scalars, sequence)
        tile = self._tile(ins, scalars, seq, (self.sequences.batch(sequence), kv_head), number)
        return tile._replace(rows=cutlass.min(tile.rows, self.c.tile_m))
