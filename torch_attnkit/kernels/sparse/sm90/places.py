"""Where a producer's warp brings its rows of a tile of keys."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES, THREADS
from torch_attnkit.cuda.smem import CHUNK

from .config import HALVES, LOADERS, Config
from .meeting import Meeting
from .schedule import Row

LANES = 32
COLUMN_CHUNKS = ROW_BYTES // CHUNK  # of a row of a block of columns


@dsl_user_op
def _joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """The 64 bits that two registers hold."""
    return asm(Int64, [low, high], "mov.b64 $0, {$1, $2};", loc=loc, ip=ip)


def held_by(lane: Any, address: Int64) -> Int64:
    """The ``address`` of another lane of the warp."""
    return _joined(cute.arch.shuffle_sync(Int32(address), lane), cute.arch.shuffle_sync(Int32(address >> 32), lane))


def warp_of_producer() -> Int32:
    return cute.arch.thread_idx()[0] % THREADS // LANES


class Places:
    """Key ``4 i + w`` of a tile is row ``i`` of warp ``w``: a consumer finds whether two neighbours count in two words
    of the mask."""

    def __init__(self, config: Config):
        self.c = config
        self.rows = config.keys // LOADERS  # of a warp
        self.chunks = config.ring.part * config.itemsize // CHUNK  # of half a row in shared memory
        self.abreast = LANES // self.chunks  # half rows that a warp copies at once

    def key(self, n: Int32) -> Int32:
        """This lane's key of tile n, counted from the CTA's first; lanes without a row have the last one's."""
        warp = warp_of_producer()
        return n * self.c.keys + cutlass.min(cute.arch.lane_idx(), self.rows - 1) * LOADERS + warp

    def counts(self, row: Row) -> Int32:
        """Which of the warp's rows count, a bit for each."""
        return cute.arch.vote_ballot_sync(row.counts & (cute.arch.lane_idx() < self.rows))

    def place(self, shared: Int32, meeting: Meeting, n: Int32) -> Int32:
        """Where fill n of the ring is, of half a tile."""
        return self.c.shared.ring.at(shared) + meeting.tiles.slot(n) * self.c.half_bytes

    def chunk_at(self, place: Int32, key: Int32) -> Int32:
        """Where this lane's chunk of a key of half a tile is."""
        chunk = cute.arch.lane_idx() % self.chunks
        block = place + chunk // COLUMN_CHUNKS * (self.c.keys * ROW_BYTES)
        return block + key * ROW_BYTES + ((chunk % COLUMN_CHUNKS) ^ (key & 7)) * CHUNK

    def set_mask(self, shared: Int32, meeting: Meeting, n: Int32, counts: Int32) -> None:
        """Of the tile with fill n of the ring, when nobody reads that of the tile before; called by one lane."""
        warp = warp_of_producer()
        meeting.mask(shared)[meeting.tiles.slot(n) // HALVES, warp] = counts
