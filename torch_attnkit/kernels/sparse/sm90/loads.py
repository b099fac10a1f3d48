"""The producer warpgroup: Q of a work tile, and its keys row by row, by ``cp.async``. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.kernels.decode.config import CHUNK
from torch_attnkit.kernels.decode.sm90.config import HEADS, ROW_BYTES, THREADS

from .arguments import Numbers, Tensors
from .config import HALVES, LOADERS, Config
from .meeting import Meeting
from .schedule import Keys, Row, WorkTile, entry_of, first_entry_of, guess_of, keys_of, row_of, work_tile, work_tiles

LANES = 32
_COLUMN_CHUNKS = ROW_BYTES // CHUNK  # of a row of a block of columns


@dsl_user_op
def _joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """The 64 bits that two registers hold."""
    return asm(Int64, [low, high], "mov.b64 $0, {$1, $2};", loc=loc, ip=ip)


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
    target = c.shared.query.at(shared) + chunk // _COLUMN_CHUNKS * (HEADS * ROW_BYTES)
    for i in cutlass.range(HEADS * chunks // threads, unroll=4):
        head = i * (threads // chunks) + thread // chunks
        valid = cutlass.select_(head < tile.heads, Int32(CHUNK), Int32(0))
        to = target + head * ROW_BYTES + ((chunk % _COLUMN_CHUNKS) ^ (head & 7)) * CHUNK
        op.copy_16_async(to, source + row_bytes * cutlass.min(head, tile.heads - 1), valid)
    cute.arch.cp_async_mbarrier_arrive_noinc(meeting.query.full)


@dsl_user_op
def _prefetch(source: Int64, nbytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Bring a row of device memory to the L2; a multiple of 16 bytes."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    asm(None, [source, Int32(nbytes)], text, memory=True, loc=loc, ip=ip)


def held_by(lane: Any, address: Int64) -> Int64:
    """The ``address`` of another lane of the warp."""
    return _joined(cute.arch.shuffle_sync(Int32(address), lane), cute.arch.shuffle_sync(Int32(address >> 32), lane))


class Producer:
    """Key ``4 i + w`` of a tile is row ``i`` of warp ``w``: a consumer finds whether two neighbours count in two words
    of the mask. Of encoded rows ``CodedProducer`` loads tiles in its own way."""

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.keys // LOADERS  # of a warp
        self.chunks = config.ring.part * config.itemsize // CHUNK  # of half a row in shared memory
        self.abreast = LANES // self.chunks  # half rows that a warp copies at once

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, shared: Int32, meeting: Meeting, first: Int32, part: Int32):
        c = self.c
        filled, item = Int32(0), Int32(0)  # tiles and work tiles so far
        divisor = self._divisor(tensors)
        for index in cutlass.range(first, work_tiles(tensors, numbers), numbers.together, unroll=1):
            tile = work_tile(tensors, numbers, index)
            guess = guess_of(tensors, numbers, tile.token, part, self._key(Int32(0)))
            keys = keys_of(c, tensors, numbers, tile.token, part)
            tiles = keys.tiles(c.keys)
            key = keys.first + self._key(Int32(0))
            row = row_of(c, tensors, keys, key, first_entry_of(tensors, numbers, keys, tile.token, key, guess))
            # The first keys have a place before Q has: that is read until the last scores of the work tile before.
            row = self._step(tensors, numbers, keys, tile, row, divisor, shared, meeting, Int32(0), filled)
            self._begin(tensors, tile, tiles, shared, meeting, item)
            self._prefetch_query(tensors, numbers, index + numbers.together)
            for n in cutlass.range(1, tiles, unroll=1):
                row = self._step(tensors, numbers, keys, tile, row, divisor, shared, meeting, n, filled)
            filled += tiles
            item += 1
        self._finish(divisor, shared, meeting, filled)

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
        key = keys.first + self._key(n + 1)
        entry = entry_of(tensors, numbers, keys, tile.token, key)  # on its way while tile n is loaded
        self._load_tile(row, divisor, shared, meeting, filled, n)
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

    def _key(self, n: Int32) -> Int32:
        """This lane's key of tile n, counted from the CTA's first; lanes without a row have the last one's."""
        warp = cute.arch.thread_idx()[0] % THREADS // LANES
        return n * self.c.keys + cutlass.min(cute.arch.lane_idx(), self.rows - 1) * LOADERS + warp

    @cute.jit
    def _prefetch(self, row: Row):
        if const_expr(self.c.prefetch):
            if row.counts:
                _prefetch(row.address, self.c.dim * self.c.itemsize)

    def _divisor(self, tensors: Tensors) -> Any:
        """What the numbers of encoded rows are divided by, or None."""
        return None

    @cute.jit
    def _load_tile(self, row: Row, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32, n: Int32):
        """Tile n of the work tile, before which ``filled`` came; rows that do not count become zeros. The columns of
        the warpgroup that computes its scores come first, since that one gives their place back first."""
        counts = self._counts(row)
        for i in cutlass.range_constexpr(HALVES):
            half = (n + i) % HALVES
            self._load_half(row.address, counts, half, shared, meeting, (filled + n) * HALVES + half)

    def _finish(self, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32) -> None:
        """After the last of ``filled`` tiles."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    def _counts(self, row: Row) -> Int32:
        """Which of the warp's rows count, a bit for each."""
        return cute.arch.vote_ballot_sync(row.counts & (cute.arch.lane_idx() < self.rows))

    def _place(self, shared: Int32, meeting: Meeting, n: Int32) -> Int32:
        """Where fill n of the ring is, of half a tile."""
        return self.c.shared.ring.at(shared) + meeting.tiles.slot(n) * self.c.half_bytes

    def _chunk_at(self, place: Int32, key: Int32) -> Int32:
        """Where this lane's chunk of a key of half a tile is."""
        chunk = cute.arch.lane_idx() % self.chunks
        block = place + chunk // _COLUMN_CHUNKS * (self.c.keys * ROW_BYTES)
        return block + key * ROW_BYTES + ((chunk % _COLUMN_CHUNKS) ^ (key & 7)) * CHUNK

    def _set_mask(self, shared: Int32, meeting: Meeting, n: Int32, counts: Int32) -> None:
        """Of the tile with fill n of the ring, when nobody reads that of the tile before; called by one lane."""
        warp = cute.arch.thread_idx()[0] % THREADS // LANES
        meeting.mask(shared)[meeting.tiles.slot(n) // HALVES, warp] = counts

    @cute.jit
    def _load_half(self, address: Int64, counts: Int32, half: Int32, shared: Int32, meeting: Meeting, n: Int32):
        """Half of the columns of this warp's rows, which is fill n of the ring."""
        warp, lane = cute.arch.thread_idx()[0] % THREADS // LANES, cute.arch.lane_idx()
        column = (half * self.chunks + lane % self.chunks) * CHUNK
        full = meeting.tiles.await_empty(n)
        place = self._place(shared, meeting, n)
        for i in cutlass.range_constexpr(self.rows // self.abreast):
            mine = i * self.abreast + lane // self.chunks
            to = self._chunk_at(place, mine * LOADERS + warp)
            op.copy_16_async(to, held_by(mine, address) + column, ((counts >> mine) & 1) * CHUNK)
        if lane == 0:
            self._set_mask(shared, meeting, n, counts)
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
