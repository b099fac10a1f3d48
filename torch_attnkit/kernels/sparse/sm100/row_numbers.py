"""A token's keys as rows of two matrices, of which TMA asks for their numbers.

A cache whose rows have one distance is a matrix, with rows of other requests or pages, and perhaps others, between. The
keys of a window are padded to a group of 16, so that the keys of a group are all of one matrix: shares of a token's
keys begin with groups, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm100.row_copies import tensor_map

from ..sm90 import schedule
from ..sm90.arguments import Numbers, Tensors
from ..sm90.plan import ALIGNED
from ..sm90.schedule import Guess, Keys
from .config import Config

GROUP = ALIGNED  # keys
_ALL = (1 << GROUP) - 1  # a bit for each


class Matrix(NamedTuple):
    """A cache as TMA has it."""

    boxes: Any  # the atom for a warp's rows of a tile
    gathers: Any  # for single ones; None where cp.async brings these
    apart: Int32  # rows from one request, or page, to the next


class Matrices(NamedTuple):
    near: Matrix
    far: Matrix


class RowKeys(NamedTuple):
    """The keys of a token; ``keys`` counts those of the window with what pads them."""

    keys: Keys
    window: Int32  # how many of them there are
    near: Int32  # the number of the window's first row; of pages nothing
    far: Int32  # of the request's first entry


def matrices(config: Config, tensors: Tensors) -> Matrices:
    """On the host."""
    return Matrices(_matrix(config, tensors.near), _matrix(config, tensors.far))


def _matrix(config: Config, cache: cute.Tensor) -> Matrix:
    apart = cache.stride[0] // cache.stride[1]
    rows = (cache.shape[0] - 1) * apart + cache.shape[1]
    layout = cute.make_layout((rows, config.dim), stride=(cache.stride[1], 1))
    matrix = cute.make_tensor(cache.iterator, layout)
    gathers = tensor_map(matrix, 1) if config.grouped else None
    return Matrix(tensor_map(matrix, config.own_keys), gathers, Int32(apart))


def _padded(keys: Int32) -> Int32:
    """A window's keys, to whole groups."""
    return (keys + (GROUP - 1)) & -GROUP


@cute.jit
def request_of(tensors: Tensors, numbers: Numbers, token: Int32):
    """A token's, or any where it is not there."""
    request = token // numbers.tokens_each
    if numbers.has_requests != 0:
        request = tensors.request[token]
    return cutlass.select_(Uint32(request) < Uint32(numbers.requests), request, Int32(0))


@cute.jit
def row_keys_of(config: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, m: Matrices, token: Int32, part: Int32):
    """The keys of a token, of which CTA ``part`` of those that share it has a share."""
    all_keys = schedule.keys_of(config, tensors, numbers, token, Int32(0))
    request = request_of(tensors, numbers, token)
    near = _padded(all_keys.near_count)
    total = near + all_keys.far_count
    share = schedule.share_of(numbers, total)
    first = cutlass.min(share * part, total)
    keys = Keys(
        all_keys.near, all_keys.near_first, near, all_keys.far, all_keys.far_count, all_keys.limit, first,
        cutlass.min(first + share, total),
    )  # fmt: skip
    return RowKeys(keys, all_keys.near_count, request * m.near.apart + all_keys.near_first, request * m.far.apart)


def guess_of(tensors: Tensors, numbers: Numbers, token: Int32, part: Int32, key: Int32) -> Guess:
    """As ``schedule`` has it, where windows are padded."""
    near = _padded(cutlass.min(numbers.window, numbers.capacity))
    return schedule.guess_of(tensors, numbers._replace(window=near, capacity=near), token, part, key)


@cute.jit
def row_of(config: cutlass.Constexpr, tensors: Tensors, m: Matrices, keys: RowKeys, key: Int32, entry: Int32):
    """The number of a key's row, in the matrix of the window or in that of the entries, or -1: it does not count."""
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
    """The rows of a warp's two groups in a tile, 16 lanes each; bits are lanes."""

    row: Int32  # this lane's
    counts: Int32  # whether a row counts
    follow: Int32  # whether it follows the rows of its group before it

    def none(self, half: Any) -> Any:
        """Of the warp's group in a ``half`` of the tile no row counts."""
        return (self.counts >> half * GROUP) & _ALL == 0

    def follows(self, half: Any) -> Any:
        """All its rows follow one another."""
        return (self.follow >> half * GROUP) & _ALL == _ALL


def groups_of(row: Int32) -> Groups:
    lane = cute.arch.lane_idx()
    first = cute.arch.shuffle_sync(row, lane & GROUP)
    return Groups(row, cute.arch.vote_ballot_sync(row >= 0), cute.arch.vote_ballot_sync(row == first + lane % GROUP))


@cute.jit
def _in_pages(cache: cute.Tensor, table: cute.Tensor, m: Matrix, pages: Int64, key: Int32, counts: cutlass.Boolean):
    """The row of a request's key, whose row of the table is at ``pages``. A page that is not there has no keys."""
    size = Uint32(Int32(cache.shape[1]))
    number = Uint32(key) // size
    page = Int32(-1)
    if counts:
        page = op.load_pair(pages + Int64(table.stride[1]) * Int64(number) * 4)
    known = (page >= 0) & (page < cache.shape[0])
    return cutlass.select_(known, page * m.apart + Int32(Uint32(key) - number * size), Int32(-1))
