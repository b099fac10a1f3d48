"""Producer of two sides by TMA: row indices for gather4 from the window cache and the entry cache, each viewed as a 2-D
matrix of constant row stride.

Lane l of warp w looks up row 64 (l // 16) + 16 w + l % 16 of a tile; a warp loads the group of 16 rows of its side,
multicast to both: one box if the rows are contiguous, else gather4. The window is padded to whole groups, so that a
group is of one matrix; shares of a token's keys begin with groups, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda import word_ops
from torch_attnkit.cuda.sm100 import row_copies
from torch_attnkit.cuda.sm100.row_copies import tensor_map

from .. import token_keys as schedule
from ..arguments import Scalars, Tensors
from ..sm90.plan import ALIGNED
from ..token_keys import Guess, Keys, entry_of, first_entry_of
from .config import KEYS, LANES, LOADERS, Config
from .cta import CtaCoord, Memory, own_row, own_warp

GROUP = ALIGNED  # keys
_ALL = (1 << GROUP) - 1  # a bit for each


class Matrix(NamedTuple):
    """A cache as a 2-D matrix for TMA."""

    boxes: Any  # TMA atom of a warp's rows of a tile
    gathers: Any  # TMA atom for gather4; None where cp.async loads single rows
    apart: Int32  # rows from one request, or page, to the next


class Matrices(NamedTuple):
    near: Matrix
    far: Matrix


class RowKeys(NamedTuple):
    """A token's keys; ``keys`` counts the window with its padding."""

    keys: Keys
    window: Int32  # number of valid ones
    near: Int32  # the number of the window's first row; of pages nothing
    far: Int32  # of the request's first entry


def matrices(config: Config, tensors: Tensors) -> Matrices:
    """Host side."""
    return Matrices(_matrix(config, tensors.near), _matrix(config, tensors.far))


def _matrix(config: Config, cache: cute.Tensor) -> Matrix:
    apart = cache.stride[0] // cache.stride[1]
    rows = (cache.shape[0] - 1) * apart + cache.shape[1]
    layout = cute.make_layout((rows, config.dim), stride=(cache.stride[1], 1))
    matrix = cute.make_tensor(cache.iterator, layout)
    gathers = tensor_map(matrix, 1) if config.gather4 else None
    return Matrix(tensor_map(matrix, config.own_keys), gathers, Int32(apart))


def _padded(keys: Int32) -> Int32:
    """Keys of a window rounded up to whole groups."""
    return (keys + (GROUP - 1)) & -GROUP


@cute.jit
def request_of(tensors: Tensors, scalars: Scalars, token: Int32):
    """Request of a token, or 0 if it is out of range."""
    request = token // scalars.tokens_each
    if scalars.has_requests != 0:
        request = tensors.request[token]
    return cutlass.select_(Uint32(request) < Uint32(scalars.requests), request, Int32(0))


@cute.jit
def row_keys_of(config: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, m: Matrices, token: Int32, part: Int32):
    """The keys of a token, and the range of them of CTA ``part``."""
    all_keys = schedule.keys_of(config, tensors, scalars, token, Int32(0))
    request = request_of(tensors, scalars, token)
    near = _padded(all_keys.near_count)
    total = near + all_keys.far_count
    share = schedule.share_of(scalars, total)
    first = cutlass.min(share * part, total)
    keys = Keys(
        all_keys.near, all_keys.near_first, near, all_keys.far, all_keys.far_count, all_keys.limit, first,
        cutlass.min(first + share, total),
    )  # fmt: skip
    return RowKeys(keys, all_keys.near_count, request * m.near.apart + all_keys.near_first, request * m.far.apart)


def guess_of(tensors: Tensors, scalars: Scalars, token: Int32, part: Int32, key: Int32) -> Guess:
    """``token_keys.guess_of`` with a padded window."""
    near = _padded(cutlass.min(scalars.window, scalars.capacity))
    return schedule.guess_of(tensors, scalars._replace(window=near, capacity=near), token, part, key)


@cute.jit
def row_of(config: cutlass.Constexpr, tensors: Tensors, m: Matrices, keys: RowKeys, key: Int32, entry: Int32):
    """Row index of a key in the matrix of its cache; -1 if invalid."""
    near_paged, far_paged = config.paged
    k = keys.keys
    is_near = key < k.near_count
    near_counts = (key < keys.window) & (key < k.stop)
    far_counts = (key < k.stop) & (not is_near) & (Uint32(entry) < Uint32(k.limit))
    if const_expr(near_paged):
        near = _in_pages(tensors.near, tensors.near_table, m.near, k.near, k.near_first + key, near_counts)
    else:
        near = cutlass.select_(near_counts, keys.near + key, Int32(-1))
    if const_expr(far_paged):
        far = _in_pages(tensors.far, tensors.far_table, m.far, k.far, entry, far_counts)
    else:
        far = cutlass.select_(far_counts, keys.far + entry, Int32(-1))
    return cutlass.select_(is_near, near, far)


class Groups(NamedTuple):
    """The warp's two groups of 16 rows; bits are lanes."""

    row: Int32  # this lane's
    counts: Int32  # whether a row counts
    follow: Int32  # whether it follows the rows of its group before it

    def none(self, half: Any) -> Any:
        """No row of the group in ``half`` is valid."""
        return (self.counts >> half * GROUP) & _ALL == 0

    def follows(self, half: Any) -> Any:
        """The rows of the group are contiguous."""
        return (self.follow >> half * GROUP) & _ALL == _ALL


def groups_of(row: Int32) -> Groups:
    lane = cute.arch.lane_idx()
    first = cute.arch.shuffle_sync(row, lane & GROUP)
    return Groups(row, cute.arch.vote_ballot_sync(row >= 0), cute.arch.vote_ballot_sync(row == first + lane % GROUP))


@cute.jit
def _in_pages(cache: cute.Tensor, table: cute.Tensor, m: Matrix, pages: Int64, key: Int32, counts: cutlass.Boolean):
    """Row index of a request's key by block table, whose row is at ``pages``; -1 if the page is invalid."""
    size = Uint32(Int32(cache.shape[1]))
    number = Uint32(key) // size
    page = Int32(-1)
    if counts:
        page = op.load_pair(pages + Int64(table.stride[1]) * Int64(number) * 4)
    known = (page >= 0) & (page < cache.shape[0])
    return cutlass.select_(known, page * m.apart + Int32(Uint32(key) - number * size), Int32(-1))


_HALF = KEYS // 2
_WORD = 4  # bytes


class GatherProducer:
    """Four warps."""

    def __init__(self, config: Config):
        c = self.c = config
        # With block tables, unrolled parts would spill row indices.
        self.unroll = 1 if any(c.paged) else c.mma.parts
        self.share = c.mma.stage_bytes // LOADERS  # bytes of a part that one warp of each side loads

    @cute.jit
    def run(self, tensors: Tensors, scalars: Scalars, matrices: Matrices, cta: CtaCoord, m: Memory):
        """All tiles of the CTA's share. Joins the cluster barrier once the first keys are looked up."""
        c = self.c
        guess = guess_of(tensors, scalars, cta.token, cta.part, own_row())
        keys = row_keys_of(c, tensors, scalars, matrices, cta.token, cta.part)
        key = keys.keys.first + own_row()
        entry = first_entry_of(tensors, scalars, keys.keys, cta.token, key, guess)
        row = row_of(c, tensors, matrices, keys, key, entry)
        tiles = cute.arch.make_warp_uniform((keys.keys.stop - keys.keys.first + (KEYS - 1)) // KEYS)
        cute.arch.cluster_wait()
        for n in cutlass.range(tiles, unroll=1):
            key = keys.keys.first + (n + 1) * KEYS + own_row()
            entry = entry_of(tensors, scalars, keys.keys, cta.token, key)  # in flight while tile n is loaded
            self._load_tile(matrices, keys, row, cta, m, n)
            row = row_of(c, tensors, matrices, keys, key, entry)

    @cute.jit
    def _load_tile(self, matrices: Matrices, keys: RowKeys, row: Int32, cta: CtaCoord, m: Memory, n: Int32):
        """Invalid rows are zero-filled: TMA rows out of range."""
        c = self.c
        groups = groups_of(row)
        m.sRow[cute.arch.lane_idx(), own_warp()] = row
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            rows_at = m.sRow.iterator.toint() + (own_warp() * LANES + cta.side * GROUP) * _WORD
            rows = [row for i in range(0, GROUP, 4) for row in word_ops.load_words(4, rows_at + i * _WORD)]
            none = groups.none(cta.side)
            boxed = none | groups.follows(cta.side)
            first = cutlass.select_(none, Int32(-GROUP), rows[0])
            in_tile = cta.side * _HALF + own_warp() * GROUP  # the group's first key
            near = keys.keys.first + n * KEYS + in_tile < keys.keys.near_count
            boxes, gathers = (
                cutlass.select_(near, row_copies.address_of(a), row_copies.address_of(b))
                for a, b in zip(matrices.near[:2], matrices.far[:2], strict=True)
            )
            ctas = Int32(3) << cta.split * 2
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
