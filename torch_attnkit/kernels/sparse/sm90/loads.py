"""The producer warpgroup: Q of a work tile, and its keys row by row, by ``cp.async``."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK

from .arguments import Numbers, Tensors
from .coded import CodedTiles
from .config import HALVES, Config
from .meeting import Meeting
from .places import COLUMN_CHUNKS, Places
from .plain import PlainTiles
from .schedule import (
    Keys,
    Row,
    WorkTile,
    entry_of,
    first_entry_of,
    guess_of,
    keys_of,
    row_of,
    without_end,
    work_tile,
    work_tiles,
)

_LINE = 32  # words of four bytes in a line of the L2


@cute.jit
def load_query(
    config: cutlass.Constexpr, tensors: Tensors, tile: WorkTile, shared: Int32, meeting: Meeting,
    threads: cutlass.Constexpr,
):  # fmt: skip
    """The share of one of ``threads`` threads; rows beyond the work tile's heads become zeros."""
    c = config
    chunks = const_expr(c.dim * c.itemsize // CHUNK)
    thread = cute.arch.thread_idx()[0] % threads
    q, chunk = tensors.q, thread % chunks
    row_bytes = Int64(q.stride[1]) * c.itemsize
    source = q.iterator.toint() + Int64(q.stride[0]) * tile.token * c.itemsize + row_bytes * tile.head + chunk * CHUNK
    target = c.shared.query.at(shared) + chunk // COLUMN_CHUNKS * (HEADS * ROW_BYTES)
    for i in cutlass.range(HEADS * chunks // threads, unroll=4):
        head = i * (threads // chunks) + thread // chunks
        valid = cutlass.select_(head < tile.heads, Int32(CHUNK), Int32(0))
        to = target + head * ROW_BYTES + ((chunk % COLUMN_CHUNKS) ^ (head & 7)) * CHUNK
        op.copy_16_async(to, source + row_bytes * cutlass.min(head, tile.heads - 1), valid)
    cute.arch.cp_async_mbarrier_arrive_noinc(meeting.query.full)


@dsl_user_op
def _prefetch(source: Int64, nbytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Bring a row of device memory to the L2; a multiple of 16 bytes."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    asm(None, [source, Int32(nbytes)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _prefetch_line(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Bring a line of device memory to the L2."""
    asm(None, [source], "prefetch.global.L2 [$0];", memory=True, loc=loc, ip=ip)


@cute.jit
def ask_ahead(config: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, tile: WorkTile, part: Int32):
    """Bring to the L2 what a CTA's first work tile begins with and only the launch says where: Q, the list, the numbers
    of the token, the sinks. Nothing is read: the launch before may still write it, and what it writes is in the L2."""
    c, thread, token = config, cute.arch.thread_idx()[0], tile.token
    sharing = Uint32(numbers.ctas * numbers.groups) if const_expr(c.merge) else Uint32(1)
    if (thread < tile.heads) & (Uint32(thread) % sharing == Uint32(part)):
        offset = Int64(tensors.q.stride[0]) * token + Int64(tensors.q.stride[1]) * (tile.head + thread)
        _prefetch(tensors.q.iterator.toint() + offset * c.itemsize, c.dim * c.itemsize)
    if part == 0:
        n = (thread - THREADS) * _LINE
        if (numbers.has_list != 0) & (n >= 0) & (n < numbers.listed):
            at = Int64(tensors.chosen.stride[0]) * token + Int64(tensors.chosen.stride[1]) * n
            _prefetch_line(tensors.chosen.iterator.toint() + at * 4)
        if thread == HEADS:
            for of_token in (tensors.end, tensors.length, tensors.request):
                _prefetch_line(of_token.iterator.toint() + Int64(of_token.stride[0]) * token * 4)
        if (numbers.has_sink != 0) & (thread > HEADS) & (thread <= HEADS + HEADS // _LINE):
            head = tile.head + cutlass.min((thread - HEADS - 1) * _LINE, tile.heads - 1)
            _prefetch_line(tensors.sink.iterator.toint() + Int64(tensors.sink.stride[0]) * head * 4)


class Producer:
    """What a CTA goes through; ``tiles`` are how one is loaded."""

    def __init__(self, config: Config, tiles: PlainTiles | CodedTiles):
        self.c, self.tiles, self.places = config, tiles, Places(config)

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, shared: Int32, meeting: Meeting, first: Int32, part: Int32):
        c = self.c
        filled, item = Int32(0), Int32(0)  # tiles and work tiles so far
        divisor = self.tiles.divisor(tensors)
        for index in cutlass.range(first, work_tiles(tensors, numbers), numbers.together, unroll=1):
            tile = work_tile(tensors, numbers, index)
            guess = guess_of(tensors, numbers, tile.token, part, self.places.key(Int32(0)))
            keys = keys_of(c, tensors, numbers, tile.token, part)
            # Behind other work tiles, whose tiles are still multiplied while the list is read.
            if const_expr(not c.merge):
                if index >= numbers.together:
                    keys = without_end(tensors, numbers, keys, tile.token)
            tiles = keys.tiles(c.keys)
            key = keys.first + self.places.key(Int32(0))
            row = row_of(c, tensors, keys, key, first_entry_of(tensors, numbers, keys, tile.token, key, guess))
            # The first keys have a place before Q has: that is read until the last scores of the work tile before.
            row = self._step(tensors, numbers, keys, tile, row, divisor, shared, meeting, Int32(0), filled)
            self._begin(tensors, tile, tiles, shared, meeting, item)
            self._prefetch_query(tensors, numbers, index + numbers.together)
            for n in cutlass.range(1, tiles, unroll=1):
                row = self._step(tensors, numbers, keys, tile, row, divisor, shared, meeting, n, filled)
            filled += tiles
            item += 1
        self.tiles.finish(divisor, shared, meeting, filled)

    @cute.jit
    def bring(
        self, warpgroup: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, tile: WorkTile, part: Int32,
        shared: Int32, meeting: Meeting,
    ):  # fmt: skip
        """A warpgroup's share of the keys that a CTA has at once; 0 is the producer. It looks up all of them first."""
        c, divisor, tiles = self.c, self.tiles.divisor(tensors), self._turns(warpgroup)
        at = [self.places.key(Int32(n)) for n in tiles]
        guesses = [guess_of(tensors, numbers, tile.token, part, key) for key in at]
        keys = keys_of(c, tensors, numbers, tile.token, part)
        numbered = [keys.first + key for key in at]
        entries = [
            first_entry_of(tensors, numbers, keys, tile.token, key, guess)
            for key, guess in zip(numbered, guesses, strict=True)
        ]
        rows = [row_of(c, tensors, keys, key, entry) for key, entry in zip(numbered, entries, strict=True)]
        self.tiles.bring(rows, divisor, shared, meeting, tiles, warpgroup)

    def _turns(self, warpgroup: int) -> range:
        """Encoded tiles are brought in turn by all warpgroups, others by the consumers that multiply their columns."""
        return range(self.c.stages) if self.c.row.plain else range(warpgroup, self.c.stages, 1 + HALVES)

    @cute.jit
    def _begin(self, tensors: Tensors, tile: WorkTile, tiles: Int32, shared: Int32, meeting: Meeting, item: Int32):
        """Q, where consumers do not bring it themselves, and the number of tiles."""
        meeting.query.await_empty(item)
        if const_expr(not self.c.merge):
            load_query(self.c, tensors, tile, shared, meeting, THREADS)
        if cute.arch.thread_idx()[0] % THREADS == 0:
            meeting.info(shared)[0] = tiles
            cute.arch.mbarrier_arrive(meeting.query.full)

    @cute.jit
    def _step(
        self, tensors: Tensors, numbers: Numbers, keys: Keys, tile: WorkTile, row: Row, divisor: Any, shared: Int32,
        meeting: Meeting, n: Int32, filled: Int32,
    ):  # fmt: skip
        """Load tile n of the work tile, before which ``filled`` came; returns this lane's row of the next."""
        key = keys.first + self.places.key(n + 1)
        entry = entry_of(tensors, numbers, keys, tile.token, key)  # on its way while tile n is loaded
        self.tiles.load(row, divisor, shared, meeting, filled, n)
        following = row_of(self.c, tensors, keys, key, entry)
        self._prefetch(following)
        return following

    @cute.jit
    def _prefetch_query(self, tensors: Tensors, numbers: Numbers, index: Int32):
        """Q of a later work tile to the L2: its place is free when scores already wait for it."""
        thread = cute.arch.thread_idx()[0] % THREADS
        if const_expr(not self.c.merge):
            if index < work_tiles(tensors, numbers):
                tile, q = work_tile(tensors, numbers, index), tensors.q
                if thread < tile.heads:
                    offset = Int64(q.stride[0]) * tile.token + Int64(q.stride[1]) * (tile.head + thread)
                    _prefetch(q.iterator.toint() + offset * self.c.itemsize, self.c.dim * self.c.itemsize)

    @cute.jit
    def _prefetch(self, row: Row):
        if const_expr(self.c.prefetch):
            if row.counts:
                _prefetch(row.address, self.c.dim * self.c.itemsize)
