"""Persistent stream-K scheduler over lengths on the device: which keys of which group a CTA attends.

    every CTA, alone:  sum the tiles of all sequences -> cut the sum into equal runs -> find its own run's sequence
                       -> work tile after work tile: mainloop, ``finish``, and of a split ``arrive``

The host knows only the cache's capacity, so a CUDA graph replays at any lengths; no CTA has more than one tile more
than another. A work tile without all tiles of its group is a split, combined by the epilogue (``combine.py``,
``sm90/combine_cooperative.py``).

A *group* is one KV head of one sequence with up to as many of its query heads as the kernel holds; those of a KV head
are its *head blocks*. A *tile* is the keys of one stage, a *work tile* the tiles of a group that one CTA has, a *unit*
of work a tile, or a whole group where groups are short.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from torch_attnkit.cuda import pdl, warp_scan
from torch_attnkit.cuda.stream_k import Partition, quotient

from .arguments import LaunchScalars, Scalars, Tensors, kv_heads_of, scalars_of

_LANES = 32


class Lengths(NamedTuple):
    """What decides which keys a sequence attends."""

    kv_len: cute.Tensor  # (B)
    kv_start: cute.Tensor  # (B), not read unless has_start
    batch: Int32
    size: Int32  # keys that the cache has room for; lengths and starts are clamped to it
    window: Int32  # -1: none
    sink_tokens: Int32
    has_start: Int32
    whole: Int32  # whether a group is one unit of work, else every tile is one


class WorkTile(NamedTuple):
    """A run of tiles of one group: all of them, or a split."""

    b: Int32
    kv_head: Int32
    head: Int32  # its first query head
    heads: Int32  # of them
    first: Int32  # tile
    stop: Int32
    slot: Int32  # of the workspace, for a split; -1: all tiles of its group


class Visible(NamedTuple):
    """The keys of one sequence: [start, sinks_end) in ``sink_tiles`` tiles and [low, end) in the others."""

    start: Int32
    sinks_end: Int32
    low: Int32
    end: Int32
    sink_tiles: Int32
    tiles: Int32  # of both, at least 1: a sequence without keys still writes its result
    units: Int32  # of work


class Run(NamedTuple):
    """The units of work [at, stop) of a block."""

    cut: Partition
    at: Int32
    stop: Int32
    sequence: Int32  # of unit ``at``
    before: Int32  # units before that sequence


def lengths_of(tensors: Tensors, given: LaunchScalars, page: int) -> Lengths:
    n = given
    size = Int32(tensors.table.shape[1]) * page if page else Int32(tensors.k.shape[2])
    batch = Int32(tensors.q.shape[0])
    return Lengths(tensors.kv_len, tensors.kv_start, batch, size, n.window, n.sink_tokens, n.has_start, n.whole)


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
    sink_tiles = quotient(sinks_end + (tile - 1), tile) - quotient(start, tile)
    sink_tiles = cutlass.select_(sinks_end > start, sink_tiles, zero)
    near = quotient(end + (tile - 1), tile) - quotient(low, tile)
    near = cutlass.select_(end > low, near, zero)
    tiles = cutlass.max(sink_tiles + near, 1)
    units = cutlass.select_(lengths.whole != 0, Int32(1), tiles)
    return Visible(start, sinks_end, low, cutlass.max(low, end), sink_tiles, tiles, units)


def tile_bounds(keys: Visible, t: Int32, tile: int) -> tuple[Int32, Int32, Int32]:
    """Tile ``t``: its first key, and the bounds [low, high) of the keys that count."""
    near = t >= keys.sink_tiles
    first = cutlass.select_(near, keys.low // tile + t - keys.sink_tiles, keys.start // tile + t) * tile
    return first, cutlass.select_(near, keys.low, keys.start), cutlass.select_(near, keys.end, keys.sinks_end)


@cute.jit
def partition(lengths: Lengths, heads: Int32, blocks: Int32, least_tiles: Int32, tile: cutlass.Constexpr):
    """Cut the work of all groups among at most ``blocks`` CTAs; none has less than ``least_tiles`` units if there are
    more.

    Where all groups are equally long and it idles no more than a 16th of the CTAs, cuts fall between groups, or
    groups are cut evenly: fewer splits to combine, and no CTA that ends one group and begins another.
    """
    lane = cute.arch.lane_idx()
    units, longest = lengths.batch, Int32(1)
    if lengths.whole == 0:
        units, longest = Int32(0), Int32(0)
        for first in cutlass.range(0, lengths.batch, _LANES, unroll=1):
            b = first + lane
            if b < lengths.batch:
                own = visible(lengths, b, tile).units
                units += own
                longest = cutlass.max(longest, own)
        for step in cutlass.range_constexpr(5):
            units += cute.arch.shuffle_sync_bfly(units, 1 << step)
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << step))
    total = units * heads
    blocks = cutlass.max(cutlass.min(blocks, quotient(total, least_tiles)), 1)
    if units == longest * lengths.batch:
        groups = heads * lengths.batch
        even = quotient(blocks, groups) * groups
        if groups > blocks:
            rounds = quotient(groups + blocks - 1, blocks)
            even = quotient(groups + rounds - 1, rounds)
        if even * 16 >= blocks * 15:
            blocks = even
    each = quotient(total, blocks)
    return Partition(total, blocks, each, total - each * blocks)


@cute.jit
def sequence_of(lengths: Lengths, heads: Int32, wanted: Int32, tile: cutlass.Constexpr):
    """The sequence that has unit ``wanted`` of the launch, and how many units precede the sequence."""
    lane = cute.arch.lane_idx()
    sequence, before, passed, first, done = Int32(0), Int32(0), Int32(0), Int32(0), lengths.whole
    if lengths.whole != 0:
        sequence = quotient(wanted, heads)
        before = sequence * heads
    while (done == 0) & (first < lengths.batch):
        b = first + lane
        own = Int32(0)
        if b < lengths.batch:
            own = visible(lengths, b, tile).units * heads
        upto = warp_scan.up_to_lane(own)
        hit = cute.arch.vote_ballot_sync(passed + upto > wanted)
        # The lowest lane that is past ``wanted``: the lanes below it have zeros in ``hit``.
        at = cute.arch.popc(~hit & (hit - 1))
        if hit != 0:
            before = passed + cute.arch.shuffle_sync(upto - own, at)
            sequence = first + at
            done = Int32(1)
        passed += cute.arch.shuffle_sync(upto, _LANES - 1)
        first += _LANES
    return sequence, before


@cute.jit
def units_before(lengths: Lengths, heads: Int32, sequence: Int32, tile: cutlass.Constexpr):
    """How many units of work precede a sequence: the inverse of ``sequence_of``. A whole warp calls this."""
    lane = cute.arch.lane_idx()
    units = Int32(0)
    for first in cutlass.range(0, sequence, _LANES, unroll=1):
        b = first + lane
        if b < sequence:
            units += visible(lengths, b, tile).units
    return warp_scan.total(units) * heads


class SchedulerConfig(Protocol):
    """What the scheduler has to know of a kernel."""

    @property
    def page(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def concurrent(self) -> bool: ...  # whether ``Scalars.concurrent`` can be more than 1
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...
    @property
    def combine(self) -> bool: ...  # whether a second kernel combines splits, else blocks of this one


class Mainloop(Protocol):
    def run(self, tensors: Tensors, loads: Any, scalars: Scalars, keys: Visible, tile: WorkTile, shared: Int32) -> None:
        """Leave the results of a work tile in shared memory, where the epilogue finds them."""


class Epilogue(Protocol):
    def finish(
        self, tensors: Tensors, scalars: Scalars, tile: WorkTile, shared: Int32, whole: Boolean, slot: Int32
    ) -> None:
        """Results in shared memory go out, those of a split into ``slot`` of the workspace."""

    def arrive(
        self, tensors: Tensors, scalars: Scalars, cut: Partition, tile: WorkTile, shared: Int32, start: Int32,
        tiles: Int32,
    ) -> None:  # fmt: skip
        """After ``finish``, for a split of the group that has units [start, start + tiles): count it."""


class LaunchedEpilogue(Epilogue, Protocol):
    """One that may have a kernel of its own."""

    def launch(
        self, tensors: Tensors, lengths: Lengths, scalars: Scalars, blocks: Int32, combine_blocks: Int32, stream: Any
    ) -> None:
        """This kernel, where there is one."""


def concurrent_of(config: SchedulerConfig, scalars: Scalars) -> Int32 | int:
    """Head blocks of a KV head on neighbouring CTAs at the same time; where it is always 1, a constant."""
    return scalars.concurrent if config.concurrent else 1


class Persistent:
    """A CTA's work tiles, one after another. Where warpgroups have roles, each loops over them for itself."""

    def __init__(self, config: SchedulerConfig, mainloop: Mainloop, epilogue: Epilogue):
        self.c, self.mainloop, self.epilogue = config, mainloop, epilogue

    @cute.jit
    def find(self, tensors: Tensors, lengths: Lengths, scalars: Scalars):
        """This CTA's run."""
        c = self.c
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        concurrent = concurrent_of(c, scalars)
        groups = kv_heads_of(tensors, c.page) * quotient(scalars.head_blocks, concurrent)
        cut = partition(lengths, groups, quotient(blocks, concurrent), scalars.least_tiles, c.keys)
        run = quotient(block, concurrent)
        at, stop = cut.start(run), cut.start(run + 1)
        if run >= cut.blocks:
            at = stop
        sequence, before = sequence_of(lengths, groups, at, c.keys)
        return Run(cut, at, stop, sequence, before)

    @cute.jit
    def run(self, tensors: Tensors, loads: Any, lengths: Lengths, scalars: Scalars, shared: Int32, own: Run):
        """``loads`` is what the mainloop's loader was given by the host, if it loads by TMA."""
        c = self.c
        block, concurrent = cute.arch.block_idx()[0], concurrent_of(c, scalars)
        groups = kv_heads_of(tensors, c.page) * quotient(scalars.head_blocks, concurrent)
        cut, at, stop, sequence, before = own
        slot = block * 2  # of a block's first work tile; of those after it only the last can be a split
        while at < stop:
            keys = visible(lengths, sequence, c.keys)
            group = quotient(at - before, keys.units)
            group_start = before + group * keys.units
            first = at - group_start
            last = cutlass.min(keys.units, first + stop - at)
            at += last - first
            whole = last - first == keys.units
            last = cutlass.select_(whole, keys.tiles, last)
            each = quotient(scalars.head_blocks, concurrent)
            kv_head = group // each  # as a ``quotient``, and ``mma.py`` spills with 96 columns
            head_block = (group - kv_head * each) * concurrent + block - quotient(block, concurrent) * concurrent
            head = head_block * c.heads
            heads = cutlass.min(scalars.group - head, c.heads)
            head += kv_head * scalars.group
            tile = WorkTile(sequence, kv_head, head, heads, first, last, cutlass.select_(whole, Int32(-1), slot))
            self.mainloop.run(tensors, loads, scalars, keys, tile, shared)
            self.epilogue.finish(tensors, scalars, tile, shared, whole, slot)
            if const_expr(c.combine):
                pass
            elif not whole:
                self.epilogue.arrive(tensors, scalars, cut, tile, shared, group_start, keys.tiles)
            slot = block * 2 + 1
            if at == before + keys.units * groups:
                before = at
                sequence += 1


class Decode:
    """A kernel without warp roles: scheduler, mainloop with its own loads, epilogue, and its second kernel if any."""

    def __init__(self, config: SchedulerConfig, mainloop: Mainloop, epilogue: LaunchedEpilogue):
        self.c, self.epilogue = config, epilogue
        self.scheduler = Persistent(config, mainloop, epilogue)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: LaunchScalars, blocks: Int32, stream: Any):
        lengths, scalars = lengths_of(tensors, numbers, self.c.page), scalars_of(tensors, numbers, self.c.page)
        launch(self.kernel(tensors, lengths, scalars), self.c, blocks, stream)
        self.epilogue.launch(tensors, lengths, scalars, blocks, numbers.combine_blocks, stream)

    @cute.kernel
    def kernel(self, tensors: Tensors, lengths: Lengths, scalars: Scalars):
        pdl.wait()  # the launch ahead may still run
        run = self.scheduler.find(tensors, lengths, scalars)
        if const_expr(self.c.combine):
            pdl.launch_dependents()  # its CTAs take the SMs that this kernel's leave
        self.scheduler.run(tensors, None, lengths, scalars, allocate(self.c), run)


def launch(kernel: Any, config: SchedulerConfig, blocks: Int32, stream: Any) -> None:
    """``blocks`` persistent CTAs of a kernel that has its arguments."""
    kernel.launch(
        grid=[blocks, 1, 1], block=[config.threads, 1, 1], smem=config.shared_bytes, stream=stream,
        min_blocks_per_mp=config.blocks_per_sm, preferred_smem_carveout=100, use_pdl=pdl.use(),
    )  # fmt: skip


def allocate(config: SchedulerConfig) -> Int32:
    """The address of a block's shared memory, aligned for swizzles."""
    return cutlass.memory.SmemAllocator().allocate(config.shared_bytes, 1024).toint()
