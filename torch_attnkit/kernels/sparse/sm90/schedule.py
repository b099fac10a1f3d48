"""Which keys a token has, and how CTAs go through the work tiles.

A token's keys are counted through: first those of its window, then its entries. Ends, lengths, requests and lists may
say anything: what is not there does not count, and is never read.
"""

# (Traced by CuTeDSL, whose decorators are untyped.)

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS

from .arguments import Numbers, Tensors
from .plan import ALIGNED

WARP = 32
_LOOKED_AT = 8  # entries of a list by each lane at once


class WorkTile(NamedTuple):
    """Up to 64 heads of a token."""

    token: Int32
    head: Int32  # the first
    heads: Int32


class Keys(NamedTuple):
    """The keys of a token, and those of them, [first, stop), that a CTA attends."""

    near: Int64  # address of the window's first; of pages, of the request's row in the table
    near_first: Int32  # which key of the request that is
    near_count: Int32
    far: Int64  # address of the request's first entry, or of its row in the table
    far_count: Int32  # entries that are listed, or all
    limit: Int32  # entries from here on do not count
    first: Int32
    stop: Int32

    def tiles(self, keys: int) -> Int32:
        """Of so many keys; at least one for either warpgroup, so that none is a work tile ahead of the other."""
        return cutlass.max((self.stop - self.first + (keys - 1)) // keys, 2)


class Row(NamedTuple):
    """Where a key is, and whether it counts."""

    address: Int64
    counts: Boolean


def work_tiles(tensors: Tensors, numbers: Numbers) -> Int32:
    return Int32(tensors.q.shape[0]) * numbers.head_blocks


def work_tile(tensors: Tensors, numbers: Numbers, index: Int32) -> WorkTile:
    """Those of a token follow one another: what one loads the L2 has for the others."""
    blocks = Uint32(numbers.head_blocks)
    token, block = Int32(Uint32(index) // blocks), Int32(Uint32(index) % blocks)
    heads = Int32(tensors.q.shape[1])
    return WorkTile(token, block * HEADS, cutlass.min(heads - block * HEADS, HEADS))


@cute.jit
def keys_of(config: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, token: Int32, part: Int32):
    """The keys of a token, of which CTA ``part`` of those that share it has a share."""
    n, zero = numbers, Int32(0)
    request = token // n.tokens_each
    if n.has_requests != 0:
        request = tensors.request[token]
    end = cutlass.min(cutlass.max(tensors.end[token], zero), n.capacity)
    near = cutlass.min(n.window, end)
    limit = n.entries
    if n.has_length != 0:
        limit = cutlass.min(cutlass.max(tensors.length[token], zero), n.entries)
    far = cutlass.select_(n.has_list != 0, n.listed, limit)
    known = Uint32(request) < Uint32(n.requests)
    near, far = cutlass.select_(known, near, zero), cutlass.select_(known, far, zero)
    request = cutlass.select_(known, request, zero)
    total = near + far
    share = share_of(numbers, total)
    first = cutlass.min(share * part, total)
    near_paged, far_paged = config.paged
    return Keys(
        _row(tensors.near_table, request, zero) if near_paged else _row(tensors.near, request, end - near),
        end - near,
        near,
        _row(tensors.far_table if far_paged else tensors.far, request, zero),
        far,
        limit,
        first,
        cutlass.min(first + share, total),
    )


@cute.jit
def without_end(tensors: Tensors, numbers: Numbers, keys: Keys, token: Int32):
    """The same keys but for the end of the list, if no entry is named there: lists of a prefill's first tokens are
    mostly such. A warp looks, from the end, at as many as its loads bring at once."""
    last, rest = Int32(-1), cutlass.select_(numbers.has_list != 0, keys.far_count, Int32(0))
    while (last < 0) & (rest > 0):
        first = cutlass.max(rest - _LOOKED_AT * WARP, Int32(0))
        for i in cutlass.range_constexpr(_LOOKED_AT):
            n = first + i * WARP + cute.arch.lane_idx()
            entry = _listed(tensors, token, cutlass.min(n, rest - 1))
            last = cutlass.select_((n < rest) & (Uint32(entry) < Uint32(keys.limit)), n, last)
        last = cute.arch.warp_redux_sync(last, "max")
        rest = first
    stop = keys.stop
    if numbers.has_list != 0:
        stop = keys.near_count + last + 1
    return Keys(
        keys.near, keys.near_first, keys.near_count, keys.far, keys.far_count, keys.limit, keys.first,
        cutlass.min(stop, keys.stop),
    )  # fmt: skip


def _row(cache: cute.Tensor, request: Int32, key: Int32) -> Int64:
    """Its address, or that of a request's row in a table of pages."""
    size = cache.element_type.width // 8
    offset = Int64(cache.stride[0]) * request + Int64(cache.stride[1]) * key
    return cache.iterator.toint() + offset * size


class Guess(NamedTuple):
    """A key, read before it is known how many keys its token's window has: as if as many as it can have."""

    near_count: Int32
    entry: Int32


@cute.jit
def guess_of(tensors: Tensors, numbers: Numbers, token: Int32, part: Int32, key: Int32):
    """For a key counted from the CTA's first. Few tokens wait for every load, so these two go together: the window's
    end, and the list."""
    near = cutlass.min(numbers.window, numbers.capacity)
    far, entry = share_of(numbers, near + numbers.listed) * part + key - near, Int32(0)
    if (numbers.has_list != 0) & (Uint32(far) < Uint32(numbers.listed)):
        entry = _listed(tensors, token, far)
    return Guess(near, entry)


def share_of(numbers: Numbers, keys: Int32) -> Int32:
    """Keys of each CTA of a work tile."""
    step = numbers.ctas * numbers.groups * ALIGNED
    return (keys + step - 1) // step * ALIGNED


def _listed(tensors: Tensors, token: Int32, n: Int32) -> Int32:
    """Entry n of a token's list."""
    chosen = tensors.chosen
    at = Int64(chosen.stride[0]) * token + Int64(chosen.stride[1]) * n
    return op.load_pair(chosen.iterator.toint() + at * 4)


@cute.jit
def entry_of(tensors: Tensors, numbers: Numbers, keys: Keys, token: Int32, key: Int32):
    """Which entry the token's key of that number is, or would be: nothing here waits for the list."""
    entry = key - keys.near_count
    if (numbers.has_list != 0) & (entry >= 0) & (key < keys.stop):
        entry = _listed(tensors, token, entry)
    return entry


@cute.jit
def first_entry_of(tensors: Tensors, numbers: Numbers, keys: Keys, token: Int32, key: Int32, guess: Guess):
    """The same by a guess, where it was right."""
    entry = guess.entry
    if (numbers.has_list == 0) | (keys.near_count != guess.near_count):
        entry = entry_of(tensors, numbers, keys, token, key)
    return entry


@cute.jit
def row_of(config: cutlass.Constexpr, tensors: Tensors, keys: Keys, key: Int32, entry: Int32):
    """Where the token's key of that number is, in the window or among the entries; beyond the CTA's share none."""
    near_paged, far_paged = config.paged
    is_near = key < keys.near_count
    counts = (key < keys.stop) & (is_near | (Uint32(entry) < Uint32(keys.limit)))
    if const_expr(near_paged):
        near = _paged(tensors.near, tensors.near_table, keys.near, keys.near_first + key, counts & is_near)
    else:
        near = _dense(tensors.near, keys.near, key, counts)
    if const_expr(far_paged):
        far = _paged(tensors.far, tensors.far_table, keys.far, entry, counts & (not is_near))
    else:
        far = _dense(tensors.far, keys.far, entry, counts)
    return Row(cutlass.select_(is_near, near.address, far.address), cutlass.select_(is_near, near.counts, far.counts))


def _dense(cache: cute.Tensor, first: Int64, key: Int32, counts: Boolean) -> Row:
    return Row(first + Int64(cache.stride[1]) * key * (cache.element_type.width // 8), counts)


@cute.jit
def _paged(cache: cute.Tensor, table: cute.Tensor, pages: Int64, key: Int32, counts: Boolean):
    """Key ``key`` of a request, whose row of the table is at ``pages``. A page that is not there has no keys."""
    size = Uint32(Int32(cache.shape[1]))
    number = Uint32(key) // size
    page = Int32(-1)
    if counts:
        page = op.load_pair(pages + Int64(table.stride[1]) * Int64(number) * 4)
    known = (page >= 0) & (page < cache.shape[0])
    page = cutlass.select_(known, page, Int32(0))
    return Row(_row(cache, page, Int32(Uint32(key) - number * size)), known)
