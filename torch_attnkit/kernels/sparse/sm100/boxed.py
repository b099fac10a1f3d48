"""Tiles of one side whose keys follow one another in memory: boxes of TMA, no copies row by row.

Those are tiles that a dense window fills, or dense entries of which a token sees all. Of pages and of lists that would
have to be found out row by row, which costs more than it saves.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from torch_attnkit.cuda.sm100 import row_copies

from ..sm90.arguments import Numbers, Tensors
from ..sm90.schedule import Keys
from .config import KEYS, Config
from .memory import Memory
from .place import own_warp
from .row_numbers import Matrices, request_of

_SHIFT = KEYS.bit_length() - 1  # keys to tiles


class Whole(NamedTuple):
    """A token's keys in rows; of the CTA's tiles the first ``near`` ones are of this kind, and those from ``far`` to
    ``stop``."""

    matrices: Matrices
    near: Int32
    far: Int32
    stop: Int32
    near_row: Int32  # where the CTA's first tile would be, if all its keys were of the window
    far_row: Int32  # if all were entries

    def has(self, n: Int32) -> Boolean:
        return (n < self.near) | ((n >= self.far) & (n < self.stop))


class WholeTiles:
    """A warp has 32 keys that follow one another, and for each block of columns of a part a box."""

    def __init__(self, config: Config):
        c = self.c = config
        self.nbytes = c.own_keys * c.mma.part * c.itemsize  # of a part

    def of(self, tensors: Tensors, numbers: Numbers, matrices: Matrices, keys: Keys, token: Int32) -> Whole:
        """Before the first tile."""
        near_paged, far_paged = self.c.paged
        request, first = request_of(tensors, numbers, token), keys.first
        near_row = request * matrices.near.apart + keys.near_first + first
        far_row = request * matrices.far.apart - keys.near_count + first
        near = Int32(0) if near_paged else (cutlass.min(keys.near_count, keys.stop) - first) >> _SHIFT
        stop = Int32(0)
        if not far_paged:
            stop = cutlass.select_(numbers.has_list == 0, (keys.stop - first) >> _SHIFT, Int32(0))
        return Whole(matrices, near, (keys.near_count - first + (KEYS - 1)) >> _SHIFT, stop, near_row, far_row)

    @cute.jit
    def load(self, whole: Whole, m: Memory, n: Int32, p: cutlass.Constexpr):
        """Part p of tile n, which has a place; who gives it away arrives."""
        c = self.c
        near, fill = n < whole.near, n * c.mma.parts + p
        boxes = cutlass.select_(near, *(row_copies.address_of(x.boxes) for x in whole.matrices))
        row = cutlass.select_(near, whole.near_row, whole.far_row) + n * KEYS + own_warp() * c.own_keys
        full = m.ring.full + m.ring.slot(fill)
        to = m.ring_at + m.ring.slot(fill) * c.mma.stage_bytes + own_warp() * (c.own_keys * c.mma.row_bytes)
        blocks = const_expr([(p * c.mma.part + column, at) for column, at in c.blocks])
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(full, self.nbytes)
            row_copies.load_rows(to, boxes, row, full.toint(), blocks)
