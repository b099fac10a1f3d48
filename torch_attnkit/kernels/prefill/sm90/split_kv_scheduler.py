"""Schedulers that split a work tile's keys: among the CTAs of a cluster, or of persistent CTAs by stream-K."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed, rings
from torch_attnkit.cuda.stream_k import Partition
from torch_attnkit.cuda.warp_scan import most, total, up_to_lane

from ..key_blocks import Sequence
from .combine import SplitSlots, WorkspaceCombine, combine, publish
from .config import Config, GroupScalars, Layouts, RowOutputs, SplitWorkspace
from .epilogue import store
from .load_tma import KVLoads, SharedMemory
from .mainloop import Consumer
from .mask import MaskRules
from .seqlen import Sequences, WorkTile, quotient, row_tile
from .tile_scheduler import TILE_INFO, Arguments, Collective, GroupScheduler, TileInfo, TileInfoRing, sync_cluster

_LANES = 32
_LEAST = 2  # blocks of a run, if there are more: a split of one is written and read again for what it took to compute
_TILES = 2  # that the producer may be ahead


class SingleTile(GroupScheduler):
    """A CTA finds its work tile, some warps load it, the others attend and combine.

    Where tiles alone do not fill the machine, the CTAs of a cluster take a split of a tile's keys each. When they are
    through, every CTA puts its output and row statistics into its shared memory and adds up a slice of all of theirs:
    no partial result goes through device memory, nothing is counted, and no CTA waits for one that may not be running.
    Where tiles do fill the machine, two CTAs may form a ``pair`` on neighbouring tiles: each loads half of every block
    for both, by multicast.
    """

    def __init__(self, config: Config, collective: Collective):
        busy = config.converted or (config.kv == "paged" and not config.box)
        role = "widening producer" if config.fp8_kv else "busy producer" if busy else "one producer warp"
        super().__init__(config, collective, role)
        assert config.partial_bytes <= config.staged_bytes, config

    def launch_shape(self, scalars: GroupScalars) -> dict[str, Any]:
        return super().launch_shape(scalars) | {"cluster": [scalars.ctas, 1, 1]}

    def grid(self, ins: Any, scalars: GroupScalars, work: None) -> Int32:
        return self.of.sequences.clusters(ins) * scalars.ctas

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts, work: None) -> SharedMemory:
        return self.of.loader.shared_memory(memory, warp, layouts)

    def first(self, ins: Any, scalars: GroupScalars) -> tuple[Any, Any]:
        tile, kv_index, valid = self.of.sequences.cluster_tile(ins, scalars)
        return (tile, kv_index), valid

    @cute.jit
    def produce(self, args: Arguments, loads: KVLoads, smem: SharedMemory, warp: Int32, first: tuple):
        tile, kv_index = first
        ins, _, scalars, _ = args
        if warp < self.c.loader_warps:
            self.of.loader.produce(loads, ins, tile, kv_index, smem, Int32(0))
        elif const_expr(self.c.convert_warps):
            self.of.loader.converter.run(scalars, tile, smem, Int32(0))
        self._idle_through_combine(scalars)

    @cute.jit
    def _idle_through_combine(self, scalars: GroupScalars):
        """The producer's part where ``_finish_tile`` synchronises the cluster."""
        if scalars.ctas > 1:
            sync_cluster()
            if const_expr(not self.c.pair):
                sync_cluster()

    @cute.jit
    def consume(self, args: Arguments, smem: SharedMemory, mmas: tuple, first: tuple):
        tile, kv_index = first
        ins, outs, scalars, _ = args
        rows, results = self.of.sequences.rows(ins, outs, tile, kv_index)
        w = self.of.consumer(scalars, smem, mmas)
        self.mainloop.begin_ping_pong(w)
        here, sums = self.of.attend(w, rows, scalars, tile, smem, Int32(0))
        self._finish_tile(here, sums, rows, results, scalars, tile, smem)

    @cute.jit
    def _finish_tile(
        self, w: Consumer, sums: list, rows: Any, outs: RowOutputs, scalars: GroupScalars, tile: WorkTile,
        smem: SharedMemory,
    ):  # fmt: skip
        """Write the rows out, alone or together with the other CTAs of the cluster."""
        c = self.c
        if const_expr(c.pair):
            store(c, w, rows, outs, tile, sums)
            sync_cluster()  # neither CTA may leave while the other still writes to its memory
        else:
            if scalars.ctas == 1:
                store(c, w, rows, outs, tile, sums)
            else:
                self.mainloop.await_consumers()
                publish(c, w, smem.partial, sums)
                sync_cluster()
                combine(c, rows, outs, scalars, tile, smem.partial)
                sync_cluster()  # nor may one whose memory another still reads


class StreamK(GroupScheduler):
    """Persistent CTAs with equal runs of the blocks of keys of all sequences, whatever their lengths.

        producer  --K and V of one work tile after another-->  rings  -->  consumers: a tile's rows, stored or a split
        who ends the last split of a tile adds the others, which lie in device memory (``combine.WorkspaceCombine``)

    As in decode (``kernels/decode/schedule.py``), the lengths are on the device and every CTA works its run out for
    itself: it sums the blocks that all work tiles visit, cuts the sum into equal runs, and finds where its own begins.
    A work tile that a cut goes through is split. Work tiles are in the order of sequences, of a sequence in the order
    of rows, of the same rows in the order of KV heads. Every warp that loads goes through its CTA's run, the others
    have its tiles from the first; it goes on to the next tile while the consumers end the last.
    """

    def __init__(self, config: Config, collective: Collective):
        super().__init__(config, collective, "stream-K, convert" if config.convert_warps else "stream-K")
        self.partition = StreamKPartition(config, collective.sequences)

    def grid(self, ins: Any, scalars: GroupScalars, work: SplitWorkspace) -> Int32:
        return work.ctas

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts, work: SplitWorkspace) -> SharedMemory:
        c = self.c
        smem = self.of.loader.shared_memory(memory, warp, layouts)
        ring = rings(memory, warp, (("tiles", _TILES, 1, 4 * c.consumers + c.convert_warps),))["tiles"]
        self.tiles = TileInfoRing(ring, memory.allocate_tensor(Int32, cute.make_layout((TILE_INFO, _TILES)), 16))
        sCount = memory.allocate_tensor(Int32, cute.make_layout(2), 8)
        addresses = (t.iterator.toint() for t in (work.splits, work.count))
        self.combine = WorkspaceCombine(c, self.mainloop.await_consumers, *addresses, sCount)
        return smem

    @cute.jit
    def produce(self, args: Arguments, loads: KVLoads, smem: SharedMemory, warp: Int32, first: None):
        loaders, transposing = const_expr(self.c.loader_warps), const_expr(self.c.convert_warps)
        if warp < loaders:
            self.load(args, loads, smem, warp)
        elif const_expr(transposing):
            if warp < loaders + transposing:
                self.convert(args.ins, args.scalars, smem)

    @cute.jit
    def load(self, args: Arguments, loads: KVLoads, smem: SharedMemory, warp: Int32):
        """Every warp that loads goes through this CTA's run; the first tells the others."""
        ins, _, scalars, work = args
        run = self.partition.find(ins, scalars, work.start)
        at, sequence, before, fills, n = run.at, run.sequence, run.before, Int32(0), Int32(0)
        while at < run.stop:
            info, at, before = self.partition.part(ins, scalars, run, at, sequence, before)
            sequence = info.kv_index
            if info.ctas > 0:
                if warp == 0:
                    self.tiles.write(n, info.values())
                self.of.loader.produce(loads, ins, info.tile, info.kv_index, smem, fills)
                fills += info.tile.stop - info.tile.first
                n += 1
        if warp == 0:
            self.tiles.write(n, [Int32(-1)])

    @cute.jit
    def convert(self, ins: Any, scalars: GroupScalars, smem: SharedMemory):
        """Every warp that transposes V, or widens K and V."""
        run = self.of.loader.converter.run
        self.each_tile(ins, lambda info, n, fills: run(scalars, info.tile, smem, fills))

    @cute.jit
    def consume(self, args: Arguments, smem: SharedMemory, mmas: tuple, first: None):
        ins, outs, scalars, _ = args
        c, cta, sequences = self.c, cute.arch.block_idx()[0], self.of.sequences
        w = self.of.consumer(scalars, smem, mmas)
        self.mainloop.begin_ping_pong(w)
        fills, n = Int32(0), Int32(0)
        while self.tiles.wait(n) >= 0:
            info = self._read(ins, n)
            rows, _ = sequences.rows(ins, outs, info.tile, info.kv_index)
            here, sums = self.of.attend(w, rows, scalars, info.tile, smem, fills)
            info = self._read(ins, n)  # again: registers are scarce between
            rows, results = sequences.rows(ins, outs, info.tile, info.kv_index)
            if info.ctas == 1:
                store(c, here, rows, results, info.tile, sums)
            else:
                # Of a CTA's two slots the first is its first tile's; of those behind it only the last can be a split.
                slots = SplitSlots(info.first * 2 + info.early, info.first * 2 + 2, info.ctas, cta - info.first)
                if self.combine.is_last(here, info.tile, slots, info.first, sums):
                    maxima, sums = self.combine.add(here, info.tile, slots, sums)
                    store(c, here, rows, results, info.tile, sums, maxima)
            fills += info.tile.stop - info.tile.first
            self.tiles.release(n)
            n += 1

    def _read(self, ins: Any, n: Int32) -> TileInfo:
        return TileInfo.of(self.tiles.read(n), self.of.sequences.group(ins))


class Run(NamedTuple):
    """The units [at, stop) of a CTA. A work tile has a unit for each step, or one if it has no keys, and ahead of them
    ``extra`` for its start and end."""

    cut: Partition
    extra: Int32
    at: Int32
    stop: Int32
    sequence: Int32  # that unit ``at`` belongs to, or one before it that has no rows
    before: Int32  # units before that sequence


class StreamKPartition(Fixed):
    """Equal runs of the blocks of keys of all sequences."""

    def __init__(self, config: Config, sequences: Sequences):
        self.c, self.sequences = config, sequences

    def _tile(self, ins: Any, scalars: Any, seq: Sequence, at: tuple, number: Int32) -> WorkTile:
        c, group = self.c, self.sequences.group(ins)
        return row_tile(c, seq, at, group, number * c.tile_m, c.tile_m, MaskRules.of(scalars))

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
            own = Int32(0)
            if first + lane < count:
                own = self._units_of(ins, scalars, first + lane, extra)
                tiles = cutlass.max(tiles, self._tiles(ins, self.sequences.sequence(ins, scalars, first + lane)))
            units += own
            longest = cutlass.max(longest, own)
            filled += cutlass.select_(own > 0, Int32(1), Int32(0))
            of_lane = cutlass.select_(first == 0, own, of_lane)
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
        cut, cta = Partition(all_units, blocks, each, all_units - each * blocks), cute.arch.block_idx()[0]
        at, stop = cut.start(cta), cut.start(cta + 1)
        if cta >= blocks:
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
            own = of_lane
            if first > 0:
                own = Int32(0)
                if first + lane < count:
                    own = self._units_of(ins, scalars, first + lane, extra)
            upto = up_to_lane(own * heads)
            past = cute.arch.vote_ballot_sync(passed + upto > wanted)
            if past != 0:
                lowest = cute.arch.popc(~past & (past - 1))
                before = passed + cute.arch.shuffle_sync(upto - own * heads, lowest)
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
        return TileInfo(tile, sequence, number, ctas, first, early), behind, before

    def tile(self, ins: Any, scalars: Any, sequence: Int32, kv_head: Int32, number: Int32) -> WorkTile:
        """All steps of a work tile."""
        seq = self.sequences.sequence(ins, scalars, sequence)
        tile = self._tile(ins, scalars, seq, (self.sequences.batch(sequence), kv_head), number)
        return tile._replace(rows=cutlass.min(tile.rows, self.c.tile_m))
