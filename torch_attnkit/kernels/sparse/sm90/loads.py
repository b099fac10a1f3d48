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
from .config import LOADERS, Config
from .meeting import Meeting
from .schedule import Row, WorkTile, entry_of, first_entry_of, guess_of, keys_of, row_of, work_tile, work_tiles

_LANES = 32
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


class Producer:
    """Key ``4 i + w`` of a tile is row ``i`` of warp ``w``: a consumer finds whether two neighbours count in two words
    of the mask."""

    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, shared: Int32, meeting: Meeting, first: Int32, part: Int32):
        c = self.c
        filled, item = Int32(0), Int32(0)  # tiles and work tiles so far
        for index in cutlass.range(first, work_tiles(tensors, numbers), numbers.together, unroll=1):
            tile = work_tile(tensors, numbers, index)
            guess = guess_of(tensors, numbers, tile.token, part, self._key(Int32(0)))
            keys = keys_of(tensors, numbers, tile.token, part)
            tiles = keys.tiles(c.keys)
            key = keys.first + self._key(Int32(0))
            row = row_of(tensors, keys, key, first_entry_of(tensors, numbers, keys, tile.token, key, guess))
            meeting.query.await_empty(item)
            if const_expr(not c.merge):
                load_query(c, tensors, tile, shared, meeting, THREADS)
            info = meeting.info(shared)
            if cute.arch.thread_idx()[0] % THREADS == 0:
                info[0] = tiles
                cute.arch.mbarrier_arrive(meeting.query.full)
            for n in cutlass.range(tiles, unroll=1):
                key = keys.first + self._key(n + 1)
                entry = entry_of(tensors, numbers, keys, tile.token, key)  # on its way while tile n is copied
                self._load_tile(row, shared, meeting, filled + n)
                row = row_of(tensors, keys, key, entry)
                self._prefetch(row)
            filled += tiles
            item += 1
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    def _key(self, n: Int32) -> Int32:
        """This lane's key of tile n, counted from the CTA's first; lanes without a row have the last one's."""
        rows = self.c.keys // LOADERS
        warp = cute.arch.thread_idx()[0] % THREADS // _LANES
        return n * self.c.keys + cutlass.min(cute.arch.lane_idx(), rows - 1) * LOADERS + warp

    @cute.jit
    def _prefetch(self, row: Row):
        if const_expr(self.c.prefetch):
            if row.counts:
                _prefetch(row.address, self.c.dim * self.c.itemsize)

    @cute.jit
    def _load_tile(self, row: Row, shared: Int32, meeting: Meeting, n: Int32):
        """Rows that do not count become zeros."""
        c = self.c
        rows, chunks = const_expr(c.keys // LOADERS), const_expr(c.dim * c.itemsize // CHUNK)
        abreast = const_expr(max(1, _LANES // chunks))  # rows that a warp copies at once
        warp, lane = cute.arch.thread_idx()[0] % THREADS // _LANES, cute.arch.lane_idx()
        counts = cute.arch.vote_ballot_sync(row.counts & (lane < rows))
        low, high = Int32(row.address), Int32(row.address >> 32)
        chunk = lane % chunks
        stage = meeting.tiles.slot(n)
        full = meeting.tiles.await_empty(n)
        target = c.shared.ring.at(shared) + stage * c.ring.stage_bytes + chunk // _COLUMN_CHUNKS * (c.keys * ROW_BYTES)
        for i in cutlass.range_constexpr(rows // abreast):
            mine = i * abreast + lane // chunks
            source = _joined(cute.arch.shuffle_sync(low, mine), cute.arch.shuffle_sync(high, mine)) + chunk * CHUNK
            valid = ((counts >> mine) & 1) * CHUNK
            key = mine * LOADERS + warp
            to = target + key * ROW_BYTES + ((chunk % _COLUMN_CHUNKS) ^ (key & 7)) * CHUNK
            for j in cutlass.range_constexpr(max(1, chunks // _LANES)):
                blocks = const_expr(j * _LANES // _COLUMN_CHUNKS)
                op.copy_16_async(to + blocks * (c.keys * ROW_BYTES), source + j * _LANES * CHUNK, valid)
        mask = meeting.mask(shared)
        if lane == 0:
            mask[stage, warp] = counts
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
