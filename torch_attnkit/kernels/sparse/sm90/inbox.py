"""Where CTAs of a cluster that share a work tile's keys have what belongs to one of them. Imports cutlass.

    row r              CTA ``r % ctas`` adds it up, as the ``r // ctas``-th of its own
    others' of it      come to its inbox, which lies over Q, by ``st.async``
    its own            lies over the ring, which no other CTA reads or writes

A row is its normalised output in the call's dtype, with its maximum and its sum behind it. Nobody sends before all CTAs
have told all others that Q is read, nor leaves before all that is meant for it has come.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90.peers import store_16_async
from torch_attnkit.kernels.decode.sm90.config import HEADS

from .arguments import Numbers
from .config import Config
from .meeting import Meeting, peer, rank
from .schedule import WorkTile


class Place(Fixed):
    """Where a row goes: to shared memory ``at``, or ``there`` in the cluster, whose mbarrier ``come`` counts it."""

    def __init__(self, mine: Any, at: Int32, there: Int32, come: Int32):
        self.mine, self.at, self.there, self.come = mine, at, there, come

    @cute.jit
    def store(self, offset: Int32, words: list[Int32]):
        """16 bytes of the row."""
        if self.mine:
            copies.store_words(self.at + offset, words, cute.AddressSpace.smem)
        else:
            store_16_async(self.there + offset, words, self.come)


class Inbox(Fixed):
    """Of a CTA, and those of the others."""

    def __init__(self, config: Config, numbers: Numbers, shared: Int32):
        self.c, self.shared, self.ctas = config, shared, numbers.ctas
        self.rank = rank(config)
        self.rows_each = (HEADS - 1 + self.ctas) // self.ctas  # of a sender, at most

    def owner(self, row: Int32) -> Int32:
        return Int32(Uint32(row) % Uint32(self.ctas))

    def number(self, row: Int32) -> Int32:
        """Which of its owner's rows it is."""
        return Int32(Uint32(row) // Uint32(self.ctas))

    def rows(self, tile: WorkTile) -> Int32:
        """How many of the work tile's this CTA adds up."""
        return self.number(tile.heads - self.rank + (self.ctas - 1))

    def row(self, number: Int32) -> Int32:
        """Of those the one with that number."""
        return number * self.ctas + self.rank

    def place(self, meeting: Meeting, row: Int32) -> Place:
        """Where this CTA's share of a row goes."""
        owner, number = self.owner(row), self.number(row)
        cta = peer(self.c, owner)
        there, come = (op.cluster_address(at, cta) for at in (self._at(self.rank, owner, number), meeting.come.toint()))
        return Place(owner == self.rank, self._own(number), there, come)

    def found(self, sender: Int32, number: Int32) -> Int32:
        """Where a CTA's share of one of the own rows is."""
        return cutlass.select_(sender == self.rank, self._own(number), self._at(sender, self.rank, number))

    def expected(self, tile: WorkTile) -> Int32:
        """Bytes that come from others."""
        return self.rows(tile) * (self.ctas - 1) * self.c.pitch

    def _own(self, number: Int32) -> Int32:
        return self.c.shared.own.at(self.shared) + number * self.c.pitch

    def _at(self, sender: Int32, owner: Int32, number: Int32) -> Int32:
        """In the inbox of ``owner``, which has no place for what is its own."""
        before = sender - cutlass.select_(sender > owner, Int32(1), Int32(0))
        return self.c.shared.inbox.at(self.shared) + (before * self.rows_each + number) * self.c.pitch
