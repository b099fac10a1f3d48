"""The producer of one side where TMA finds keys by the numbers of their rows: a warp's keys of a tile that follow one
another in memory in boxes, others row by row, by ``cp.async``. Imports cutlass.

A part of the columns is a group of ``cp.async`` either way, of boxes an empty one: it is given away with an arrival,
and then it is there when the bytes of its boxes are.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda.sm100 import row_copies

from ..sm90.arguments import Numbers, Tensors
from ..sm90.schedule import Row, entry_of, first_entry_of
from .config import KEYS, Config
from .loads import Peer, Producer, own_row, own_warp
from .memory import Memory
from .place import Place
from .row_numbers import GROUP, Groups, Matrices, RowKeys, groups_of, guess_of, row_keys_of, row_of

_HALVES = 2  # of a tile, in which a warp has a group each
_HALF = KEYS // _HALVES


class BoxedProducer:
    """Four warps. ``Producer`` has their keys of a tile, the copies of rows, and when what is given away."""

    def __init__(self, config: Config):
        c = self.c = config
        self.rows = Producer(config)
        # Of a part: blocks of columns, and where they are in a stage.
        self.blocks = [(x * c.mma.columns, x * KEYS * c.mma.row_bytes) for x in range(c.mma.part // c.mma.columns)]
        self.nbytes = _HALVES * GROUP * c.mma.part * c.itemsize  # of a warp's boxes of a part

    @cute.jit
    def run(self, tensors: Tensors, numbers: Numbers, matrices: Matrices, place: Place, m: Memory):
        """All tiles of the CTA's share of a work tile. Meets the cluster once the first keys are looked up."""
        c, own = self.c, own_row()
        guess = guess_of(tensors, numbers, place.token, place.part, own)
        keys = row_keys_of(c, tensors, numbers, matrices, place.token, place.part)
        key = keys.keys.first + own
        entry = first_entry_of(tensors, numbers, keys.keys, place.token, key, guess)
        row = row_of(c, tensors, matrices, keys, key, entry)
        tiles = cute.arch.make_warp_uniform((keys.keys.stop - keys.keys.first + (KEYS - 1)) // KEYS)
        peer = self.rows.peer_of(place, m)
        cute.arch.cluster_wait()
        for n in cutlass.range(tiles, unroll=1):
            key = keys.keys.first + (n + 1) * KEYS + own
            entry = entry_of(tensors, numbers, keys.keys, place.token, key)  # on its way while tile n is loaded
            self._load_tile(tensors, numbers, matrices, keys, row, peer, m, n)
            self.rows.finish_after(peer, None, m, n)
            row = row_of(c, tensors, matrices, keys, key, entry)
        if const_expr(c.mma.ahead):
            if tiles > 0:
                self.rows.finish_tile(peer, None, m, tiles - 1, 0)

    @cute.jit
    def _load_tile(
        self, tensors: Tensors, numbers: Numbers, matrices: Matrices, keys: RowKeys, row: Int32, peer: Peer, m: Memory,
        n: Int32,
    ):  # fmt: skip
        first = keys.keys.first + n * KEYS + own_warp() * GROUP  # key of the warp's first group
        whole = cutlass.Boolean(False)
        if (first < keys.keys.near_count) | (numbers.has_list == 0):  # listed entries are not worth a look
            whole = self._whole(groups_of(row))
        if whole:
            self._load_boxes(matrices, keys, groups_of(row), first, peer, m, n)
        else:
            near = keys.keys.first + n * KEYS + own_row() < keys.keys.near_count
            at = [_address(x, row) for x in (tensors.near, tensors.far)]
            self.rows.load_tile(Row(cutlass.select_(near, *at), row >= 0), peer, None, m, n)

    def _whole(self, groups: Groups) -> Any:
        """Whether each group has rows that follow one another, or none."""
        first, second = (groups.none(half) | groups.follows(half) for half in range(_HALVES))
        return first & second

    @cute.jit
    def _load_boxes(
        self, matrices: Matrices, keys: RowKeys, groups: Groups, first: Int32, peer: Peer, m: Memory, n: Int32
    ):
        c = self.c
        boxes = [self._box(matrices, keys, groups, first, half) for half in range(_HALVES)]
        for p in cutlass.range_constexpr(c.mma.parts):
            fill = n * c.mma.parts + p
            self.rows.await_part(groups.counts, peer, None, m, p, n)
            full, stage = m.ring.full + m.ring.slot(fill), self.rows.stage(m, fill)
            to = stage + own_warp() * (GROUP * c.mma.row_bytes)
            blocks = [(p * c.mma.part + column, at) for column, at in self.blocks]
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, self.nbytes)
                for half, (tensor_map, row) in enumerate(boxes):
                    row_copies.load_rows(to + half * _HALF * c.mma.row_bytes, tensor_map, row, full.toint(), blocks)
            cute.arch.cp_async_commit_group()

    def _box(self, matrices: Matrices, keys: RowKeys, groups: Groups, first: Int32, half: int) -> tuple[Int64, Int32]:
        """The tensor map of a group, and its first row; without rows that count those that a matrix does not have."""
        maps = [row_copies.address_of(x) for x in (matrices.near.boxes, matrices.far.boxes)]
        row = cutlass.select_(groups.none(half), Int32(-GROUP), cute.arch.shuffle_sync(groups.row, half * GROUP))
        return cutlass.select_(first + half * _HALF < keys.keys.near_count, *maps), row


def _address(cache: Any, row: Int32) -> Int64:
    """Of a row by its number."""
    return cache.iterator.toint() + Int64(cache.stride[1]) * row * (cache.element_type.width // 8)
