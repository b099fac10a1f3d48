"""The producer of two sides where TMA finds keys by the numbers of their rows: groups of 16 that follow one another in
memory in a box, others four at a time, both for either side at once.

    tile n      a row looked up a lane -> shared memory; one lane: a part of the columns after another -> ring

Lane l of warp w has row ``64 (l // 16) + 16 w + l % 16`` of a tile, and a warp sends for the group of its side. What
comes is what the products read: no lane waits for it, and nothing is sent on.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import word_ops
from torch_attnkit.cuda.sm100 import row_copies

from ..sm90.arguments import Numbers, Tensors
from ..sm90.schedule import entry_of, first_entry_of
from .config import KEYS, LANES, LOADERS, Config
from .memory import Memory
from .place import Place, own_row, own_warp
from .row_numbers import GROUP, Matrices, RowKeys, groups_of, guess_of, row_keys_of, row_of

_HALF = KEYS // 2
_WORD = 4  # bytes


class GatheredProducer:
    """Four warps."""

    def __init__(self, config: Config):
        c = self.c = config
        # Where pages are looked up, too, numbers of rows for parts side by side do not stay in registers.
        self.unroll = 1 if any(c.paged) else c.mma.parts
        self.share = c.mma.stage_bytes // LOADERS  # bytes of a part that one warp of either side sends for

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, matrices: Matrices, place: Place, m: Memory):
        """All tiles of the CTA's share of a work tile. Meets the cluster once the first keys are looked up."""
        c = self.c
        guess = guess_of(tensors, numbers, place.token, place.part, own_row())
        keys = row_keys_of(c, tensors, numbers, matrices, place.token, place.part)
        key = keys.keys.first + own_row()
        entry = first_entry_of(tensors, numbers, keys.keys, place.token, key, guess)
        row = row_of(c, tensors, matrices, keys, key, entry)
        tiles = cute.arch.make_warp_uniform((keys.keys.stop - keys.keys.first + (KEYS - 1)) // KEYS)
        cute.arch.cluster_wait()
        for n in cutlass.range(tiles, unroll=1):
            key = keys.keys.first + (n + 1) * KEYS + own_row()
            entry = entry_of(tensors, numbers, keys.keys, place.token, key)  # on its way while tile n is sent for
            self._load_tile(matrices, keys, row, place, m, n)
            row = row_of(c, tensors, matrices, keys, key, entry)

    @cute.jit
    def _load_tile(self, matrices: Matrices, keys: RowKeys, row: Int32, place: Place, m: Memory, n: Int32):
        """Rows that do not count become zeros."""
        c = self.c
        groups = groups_of(row)
        m.sRow[cute.arch.lane_idx(), own_warp()] = row
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            rows_at = m.sRow.iterator.toint() + (own_warp() * LANES + place.side * GROUP) * _WORD
            rows = [row for i in range(0, GROUP, 4) for row in word_ops.load_words(4, rows_at + i * _WORD)]
            none = groups.none(place.side)
            boxed = none | groups.follows(place.side)
            first = cutlass.select_(none, Int32(-GROUP), rows[0])
            in_tile = place.side * _HALF + own_warp() * GROUP  # the group's first key
            near = keys.keys.first + n * KEYS + in_tile < keys.keys.near_count
            boxes, gathers = (
                cutlass.select_(near, row_copies.address_of(a), row_copies.address_of(b))
                for a, b in zip(matrices.near[:2], matrices.far[:2], strict=True)
            )
            ctas = Int32(3) << place.split * 2
            for p in cutlass.range(c.mma.parts, unroll=self.unroll):
                fill = n * c.mma.parts + p
                full = m.ring.await_empty(fill)
                if p == 0:
                    m.sMask[own_warp(), n % c.masks] = groups.counts
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.share)
                at = m.ring_at + m.ring.slot(fill) * c.mma.stage_bytes + in_tile * c.mma.row_bytes
                blocks = [(p * c.mma.part + column, to) for column, to in c.blocks]
                if boxed:
                    row_copies.load_rows(at, boxes, first, full.toint(), blocks, ctas)
                else:
                    row_copies.gather_rows(at, gathers, rows, full.toint(), blocks, ctas)
        cute.arch.sync_warp()  # the rows have been read
