"""Which rows of a tile a CTA decodes, and where their numbers go.

    Alone    all of them, for its own products
    Shared   half of them, for its own products and those of the other side: the CTA of its cluster that has the same
             keys and other heads. The other half comes from there.

Both sides' rings turn together: a place is free when the consumers of both have read it, and full when this CTA's half
is decoded and the bytes of the other have come.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm90.peers import store_16_async
from torch_attnkit.cuda.sm90.warpgroup import ROW_BYTES

from .config import LOADERS, Config
from .meeting import other_side
from .places import held_by
from .plan import SIDES


class Away(NamedTuple):
    """The other side's place for half a tile: how far its shared memory is from one's own in the addresses of the
    cluster, and the mbarrier that counts what comes there."""

    distance: Int32
    full: Int32


class Alone:
    """``rows`` of a tile are a warp's own: all that it has. RoPE channels stay where copies bring them."""

    moves = False

    def __init__(self, config: Config):
        self.rows = config.keys // LOADERS

    def own(self, address: Int64, counts: Int32) -> tuple[Int64, Int32]:
        """Addresses of the warp's own rows, one a lane, and which of them count, a bit for each: the first row's come
        first."""
        return address, counts

    def place(self, place: Int32) -> Int32:
        """Where the first of the own rows is in half a tile."""
        return place

    def away(self, full: cute.Pointer) -> None:
        """What ``store`` has to know about half a tile."""
        return None

    def store(self, at: Int32, words: list[Any], away: None) -> None:
        """16 bytes of numbers to where they are multiplied."""
        copies.store_words(at, words, cute.AddressSpace.smem)

    def give(self, full: cute.Pointer) -> None:
        """Half a tile to the consumers: this warp's rows. Called by one lane."""
        cute.arch.mbarrier_arrive(full)


class Shared:
    """The same where each side decodes half of the rows; RoPE channels are sent as numbers are."""

    moves = True

    def __init__(self, config: Config):
        self.rows = config.keys // (LOADERS * SIDES)
        self.nbytes = self.rows * config.ring.part * config.itemsize  # of half a tile, from a warp

    def own(self, address: Int64, counts: Int32) -> tuple[Int64, Int32]:
        first = self._first()
        return held_by(cute.arch.lane_idx() + first, address), counts >> first

    def place(self, place: Int32) -> Int32:
        """A multiple of eight rows behind the tile's, so that chunks are swizzled alike."""
        return place + self._first() * (LOADERS * ROW_BYTES)

    def away(self, full: cute.Pointer) -> Away:
        here = full.toint()
        there = op.cluster_address(here, other_side())
        return Away(there - Int32(here), there)

    def store(self, at: Int32, words: list[Any], away: Away) -> None:
        copies.store_words(at, words, cute.AddressSpace.smem)
        store_16_async(at + away.distance, words, away.full)

    def give(self, full: cute.Pointer) -> None:
        """The same warp of the other side sends as much as this one."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.nbytes)

    def _first(self) -> Int32:
        """The first of a warp's own rows."""
        return cute.arch.block_in_cluster_idx()[0] % SIDES * self.rows
