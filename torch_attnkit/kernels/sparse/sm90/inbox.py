"""Where CTAs of a cluster that share a work tile's keys have what belongs to one of them.

    own rows    a CTA's part of every row, over the ring: normalised, in the call's dtype, maximum and sum behind it
    inbox       row r is added up by CTA ``r % ctas``, as its number ``r // ctas``: others' parts of it come there,
                over Q, by bulk copies

Nobody sends before all CTAs have told all others that Q is read, nor leaves before all that is meant for anybody has
come.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS

from .arguments import Numbers
from .config import Config
from .meeting import Meeting, peer, rank
from .schedule import WorkTile


@dsl_user_op
def load_shared_floats(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """2 or 4 aligned floats."""
    outs = ",".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.f32 {{{outs}}}, [${count}];"
    return asm([Float32] * count, [address], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _send(target: Int32, source: Int32, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Bytes of shared memory, a multiple of 16, to another CTA of the cluster, whose mbarrier ``barrier`` counts them.
    What generic stores left at ``source`` needs a proxy fence before."""
    text = f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
    asm(None, [target, source, barrier], text, memory=True, loc=loc, ip=ip)


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

    def own(self, row: Int32) -> Int32:
        """Where this CTA's part of a row is."""
        return self.c.shared.own.at(self.shared) + row * self.c.pitch

    @cute.jit
    def send(self, meeting: Meeting, row: Int32):
        """This CTA's part of a row to the one that adds it up, by one thread."""
        owner = self.owner(row)
        if owner != self.rank:
            cta, at = peer(self.c, owner), self._at(self.rank, owner, self.number(row))
            there, come = op.cluster_address(at, cta), op.cluster_address(meeting.come.toint(), cta)
            _send(there, self.own(row), self.c.pitch, come)

    def found(self, sender: Int32, number: Int32) -> Int32:
        """Where a CTA's part of one of the rows is that this one adds up."""
        return cutlass.select_(sender == self.rank, self.own(self.row(number)), self._at(sender, self.rank, number))

    def expected(self, tile: WorkTile) -> Int32:
        """Bytes that come from others."""
        return self.rows(tile) * (self.ctas - 1) * self.c.pitch

    def _at(self, sender: Int32, owner: Int32, number: Int32) -> Int32:
        """In the inbox of ``owner``, which has no place for what is its own."""
        before = sender - cutlass.select_(sender > owner, Int32(1), Int32(0))
        return self.c.shared.inbox.at(self.shared) + (before * self.rows_each + number) * self.c.pitch
