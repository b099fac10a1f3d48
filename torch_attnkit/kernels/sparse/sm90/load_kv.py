"""Producer warpgroup: Q and 16-bit K/V rows by 16-byte ``cp.async``, row by row, since rows are scattered.

Lane l of warp w looks up row l of the warp, key 4 l + w of a tile; the index load of tile n + 1 is in flight while tile
n is copied. Invalid rows are zero-filled. Q and the rows of later tiles are prefetched to L2.
"""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import CHUNK

from ..arguments import Scalars, Tensors
from ..token_keys import (
    Keys,
    Row,
    WorkTile,
    entry_of,
    first_entry_of,
    guess_of,
    held_by,
    keys_of,
    row_of,
    without_end,
    work_tile,
    work_tiles,
)
from .barriers import Barriers
from .config import COLUMN_CHUNKS, HALVES, LANES, LOADERS, Config

_LINE = 32  # words of four bytes in a line of the L2


def producer_warp() -> Int32:
    """Index of the warp within the producer warpgroup."""
    return cute.arch.thread_idx()[0] % THREADS // LANES


class Slots:
    """Mapping of a K/V tile to producer warps and ring slots. Key 4 i + w is row i of warp w, so that a consumer finds
    the validity of two neighbouring columns in two mask words."""

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.keys // LOADERS  # of a warp
        self.chunks = config.ring.part * config.itemsize // CHUNK  # of half a row in shared memory
        self.rows_per_copy = LANES // self.chunks  # half rows that a warp copies at once

    def key(self, n: Int32) -> Int32:
        """This lane's key of tile n, from the CTA's first key on; lanes without a row repeat the last one's."""
        warp = producer_warp()
        return n * self.c.keys + cutlass.min(cute.arch.lane_idx(), self.rows - 1) * LOADERS + warp

    def counts(self, row: Row) -> Int32:
        """Validity mask of the warp's rows."""
        return cute.arch.vote_ballot_sync(row.counts & (cute.arch.lane_idx() < self.rows))

    def stage(self, shared: Int32, barriers: Barriers, n: Int32) -> Int32:
        """Address of ring slot ``n``, half a tile."""
        return self.c.shared.ring.at(shared) + barriers.tiles.slot(n) * self.c.half_bytes

    def chunk_at(self, stage: Int32, key: Int32) -> Int32:
        """Swizzled address of this lane's 16-byte chunk of a key's half row."""
        chunk = cute.arch.lane_idx() % self.chunks
        block = stage + chunk // COLUMN_CHUNKS * (self.c.keys * ROW_BYTES)
        return block + key * ROW_BYTES + ((chunk % COLUMN_CHUNKS) ^ (key & 7)) * CHUNK

    def set_mask(self, shared: Int32, barriers: Barriers, n: Int32, counts: Int32) -> None:
        """Publish the warp's validity mask with slot ``n``; one lane calls, once the tile before has been released."""
        warp = producer_warp()
        barriers.mask(shared)[barriers.tiles.slot(n) // HALVES, warp] = counts


class DenseTiles:
    """K/V loader for 16-bit rows: copied as they are."""

    def __init__(self, config: Config):
        self.c, self.slots = config, Slots(config)

    def divisor(self, tensors: Tensors) -> Any:
        """Only encoded rows have one."""
        return None

    @cute.jit
    def load(self, row: Row, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32, n: Int32):
        """Load tile n of the work tile, ``filled`` tiles after kernel start; invalid rows become zeros. The half that
        the scoring warpgroup multiplies first, and frees first, comes first."""
        counts = self.slots.counts(row)
        for i in cutlass.range_constexpr(HALVES):
            half = (n + i) % HALVES
            self._load_half(row.address, counts, half, shared, barriers, (filled + n) * HALVES + half, True)

    def load_single_pass(
        self, rows: list[Row], divisor: Any, shared: Int32, barriers: Barriers, tiles: range, warpgroup: int
    ) -> None:
        """Load the half of the columns that consumer ``warpgroup`` (1 or 2) multiplies, of all tiles at once."""
        half = warpgroup - 1
        for row, n in zip(rows, tiles, strict=True):
            fill = Int32(n * HALVES + half)
            self._load_half(row.address, self.slots.counts(row), Int32(half), shared, barriers, fill, half == 0)

    def finish(self, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32) -> None:
        """Drain the copies in flight."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def _load_half(
        self, address: Int64, counts: Int32, half: Int32, shared: Int32, barriers: Barriers, n: Int32,
        masked: cutlass.Constexpr,
    ):  # fmt: skip
        """Fill slot ``n`` with half of the columns of the warp's rows; ``masked``: publish their validity, too."""
        warp, lane = producer_warp(), cute.arch.lane_idx()
        column = (half * self.slots.chunks + lane % self.slots.chunks) * CHUNK
        full = barriers.tiles.await_empty(n)
        stage = self.slots.stage(shared, barriers, n)
        for i in cutlass.range_constexpr(self.slots.rows // self.slots.rows_per_copy):
            lane_of_row = i * self.slots.rows_per_copy + lane // self.slots.chunks
            to = self.slots.chunk_at(stage, lane_of_row * LOADERS + warp)
            op.copy_16_async(to, held_by(lane_of_row, address) + column, ((counts >> lane_of_row) & 1) * CHUNK)
        if lane == 0:
            if const_expr(masked):
                self.slots.set_mask(shared, barriers, n, counts)
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def load_query(
    config: cutlass.Constexpr, tensors: Tensors, tile: WorkTile, shared: Int32, barriers: Barriers,
    threads: cutlass.Constexpr,
):  # fmt: skip
    """This thread's share, of ``threads``, of Q; rows past the work tile's heads are zero-filled."""
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
    cute.arch.cp_async_mbarrier_arrive_noinc(barriers.query.full)


@dsl_user_op
def _prefetch(source: Int64, nbytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch ``nbytes``, a multiple of 16, of a row to L2."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    asm(None, [source, Int32(nbytes)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _prefetch_line(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch one line to L2."""
    asm(None, [source], "prefetch.global.L2 [$0];", memory=True, loc=loc, ip=ip)


@cute.jit
def prefetch_first_tile(config: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, tile: WorkTile, part: Int32):
    """Prefetch to L2, before griddepcontrol.wait, what the first work tile reads at addresses known from launch: Q,
    indices, lengths, sinks. Prefetches return no data, so the preceding kernel may still be writing it: its writes land
    in L2, too."""
    c, thread, token = config, cute.arch.thread_idx()[0], tile.token
    sharing = Uint32(scalars.ctas * scalars.groups) if const_expr(c.split_kv) else Uint32(1)
    if (thread < tile.heads) & (Uint32(thread) % sharing == Uint32(part)):
        offset = Int64(tensors.q.stride[0]) * token + Int64(tensors.q.stride[1]) * (tile.head + thread)
        _prefetch(tensors.q.iterator.toint() + offset * c.itemsize, c.dim * c.itemsize)
    if part == 0:
        n = (thread - THREADS) * _LINE
        if (scalars.has_list != 0) & (n >= 0) & (n < scalars.listed):
            at = Int64(tensors.indices.stride[0]) * token + Int64(tensors.indices.stride[1]) * n
            _prefetch_line(tensors.indices.iterator.toint() + at * 4)
        if thread == HEADS:
            for of_token in (tensors.end, tensors.length, tensors.request):
                _prefetch_line(of_token.iterator.toint() + Int64(of_token.stride[0]) * token * 4)
        if (scalars.has_sink != 0) & (thread > HEADS) & (thread <= HEADS + HEADS // _LINE):
            head = tile.head + cutlass.min((thread - HEADS - 1) * _LINE, tile.heads - 1)
            _prefetch_line(tensors.sink.iterator.toint() + Int64(tensors.sink.stride[0]) * head * 4)


class KVLoader(Protocol):
    """How the producer fills the K/V ring: ``DenseTiles`` here, dequantising loaders in ``dequant_kv.py``."""

    def divisor(self, tensors: Tensors) -> Any: ...

    def load(self, row: Row, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32, n: Int32) -> None: ...

    def load_single_pass(
        self, rows: list[Row], divisor: Any, shared: Int32, barriers: Barriers, tiles: range, warpgroup: int
    ) -> None: ...

    def finish(self, divisor: Any, shared: Int32, barriers: Barriers, filled: Int32) -> None: ...


class Producer:
    """Producer loop over work tiles and their K/V tiles, filled by ``tiles``."""

    def __init__(self, config: Config, tiles: KVLoader):
        self.c, self.tiles, self.slots = config, tiles, Slots(config)

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, shared: Int32, barriers: Barriers, first: Int32, part: Int32):
        c = self.c
        filled, item = Int32(0), Int32(0)  # tiles and work tiles so far
        divisor = self.tiles.divisor(tensors)
        for index in cutlass.range(first, work_tiles(tensors, scalars), scalars.concurrent, unroll=1):
            tile = work_tile(tensors, scalars, index)
            guess = guess_of(tensors, scalars, tile.token, part, self.slots.key(Int32(0)))
            keys = keys_of(c, tensors, scalars, tile.token, part)
            # Not for the first work tile: its latency would be exposed.
            if const_expr(not c.split_kv):
                if index >= scalars.concurrent:
                    keys = without_end(tensors, scalars, keys, tile.token)
            tiles = keys.tiles(c.keys)
            key = keys.first + self.slots.key(Int32(0))
            row = row_of(c, tensors, keys, key, first_entry_of(tensors, scalars, keys, tile.token, key, guess))
            # K/V slots are free before Q is: that is read until the previous work tile's last scores.
            row = self._step(tensors, scalars, keys, tile, row, divisor, shared, barriers, Int32(0), filled)
            self._begin(tensors, tile, tiles, shared, barriers, item)
            self._prefetch_query(tensors, scalars, index + scalars.concurrent)
            for n in cutlass.range(1, tiles, unroll=1):
                row = self._step(tensors, scalars, keys, tile, row, divisor, shared, barriers, n, filled)
            filled += tiles
            item += 1
        self.tiles.finish(divisor, shared, barriers, filled)

    @cute.jit
    def load_single_pass(
        self, warpgroup: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, tile: WorkTile, part: Int32,
        shared: Int32, barriers: Barriers,
    ):  # fmt: skip
        """A warpgroup's share of the CTA's resident keys; 0 is the producer, 1 and 2 the consumers. All index lookups
        first."""
        c, divisor, tiles = self.c, self.tiles.divisor(tensors), self._tiles_of(warpgroup)
        at = [self.slots.key(Int32(n)) for n in tiles]
        guesses = [guess_of(tensors, scalars, tile.token, part, key) for key in at]
        keys = keys_of(c, tensors, scalars, tile.token, part)
        numbered = [keys.first + key for key in at]
        entries = [
            first_entry_of(tensors, scalars, keys, tile.token, key, guess)
            for key, guess in zip(numbered, guesses, strict=True)
        ]
        rows = [row_of(c, tensors, keys, key, entry) for key, entry in zip(numbered, entries, strict=True)]
        self.tiles.load_single_pass(rows, divisor, shared, barriers, tiles, warpgroup)

    def _tiles_of(self, warpgroup: int) -> range:
        """Tiles of a warpgroup: encoded ones alternate between all three, 16-bit ones are loaded by the consumers, by
        columns."""
        return range(self.c.stages) if self.c.row.plain else range(warpgroup, self.c.stages, 1 + HALVES)

    @cute.jit
    def _begin(self, tensors: Tensors, tile: WorkTile, tiles: Int32, shared: Int32, barriers: Barriers, item: Int32):
        """Load Q, where consumers do not do it themselves, and publish the number of tiles."""
        barriers.query.await_empty(item)
        if const_expr(not self.c.split_kv):
            load_query(self.c, tensors, tile, shared, barriers, THREADS)
        if cute.arch.thread_idx()[0] % THREADS == 0:
            barriers.info(shared)[0] = tiles
            cute.arch.mbarrier_arrive(barriers.query.full)

    @cute.jit
    def _step(
        self, tensors: Tensors, scalars: Scalars, keys: Keys, tile: WorkTile, row: Row, divisor: Any, shared: Int32,
        barriers: Barriers, n: Int32, filled: Int32,
    ):  # fmt: skip
        """Load tile n of the work tile, ``filled`` tiles after kernel start; returns this lane's row of tile n + 1."""
        key = keys.first + self.slots.key(n + 1)
        entry = entry_of(tensors, scalars, keys, tile.token, key)  # in flight while tile n is loaded
        self.tiles.load(row, divisor, shared, barriers, filled, n)
        following = row_of(self.c, tensors, keys, key, entry)
        self._prefetch(following)
        return following

    @cute.jit
    def _prefetch_query(self, tensors: Tensors, scalars: Scalars, index: Int32):
        """Prefetch Q of a later work tile to L2: scores wait for it as soon as its slot is free."""
        thread = cute.arch.thread_idx()[0] % THREADS
        if const_expr(not self.c.split_kv):
            if index < work_tiles(tensors, scalars):
                tile, q = work_tile(tensors, scalars, index), tensors.q
                if thread < tile.heads:
                    offset = Int64(q.stride[0]) * tile.token + Int64(q.stride[1]) * (tile.head + thread)
                    _prefetch(q.iterator.toint() + offset * self.c.itemsize, self.c.dim * self.c.itemsize)

    @cute.jit
    def _prefetch(self, row: Row):
        if const_expr(self.c.prefetch):
            if row.counts:
                _prefetch(row.address, self.c.dim * self.c.itemsize)
