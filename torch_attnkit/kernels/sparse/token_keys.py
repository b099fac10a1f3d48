"""Work tiles, and the keys of a token: first those of its window, then its entries, counted through.

Window ends, lengths, request ids, indices and block tables are untrusted: out-of-range ones give invalid rows, which
are never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS

from .arguments import Scalars, Tensors
from .sm90.plan import ALIGNED

WARP = 32
_LOOKED_AT = 8  # entries of a list by each lane at once


class WorkTile(NamedTuple):
    """Up to 64 heads of a token."""

    token: Int32
    head: Int32  # the first
    heads: Int32


class Keys(NamedTuple):
    """A token's keys, and the range [first, stop) of them that a CTA attends."""

    near: Int64  # address of the window's first; of pages, of the request's row in the table
    near_first: Int32  # which key of the request that is
    near_count: Int32
    far: Int64  # address of the request's first entry, or of its row in the table
    far_count: Int32  # entries that are listed, or all
    limit: Int32  # entries from here on do not count
    first: Int32
    stop: Int32

    def tiles(self, keys: int) -> Int32:
        """Number of K/V tiles of ``keys`` keys; at least one for each warpgroup, so that both advance alike."""
        return cutlass.max((self.stop - self.first + (keys - 1)) // keys, 2)


class Row(NamedTuple):
    """Address of a key's row, and whether it is valid."""

    address: Int64
    counts: Boolean


def work_tiles(tensors: Tensors, scalars: Scalars) -> Int32:
    return Int32(tensors.q.shape[0]) * scalars.head_blocks


def work_tile(tensors: Tensors, scalars: Scalars, index: Int32) -> WorkTile:
    """Tiles of a token are neighbours, so that its keys are read from device memory once."""
    blocks = Uint32(scalars.head_blocks)
    token, block = Int32(Uint32(index) // blocks), Int32(Uint32(index) % blocks)
    heads = Int32(tensors.q.shape[1])
    return WorkTile(token, block * HEADS, cutlass.min(heads - block * HEADS, HEADS))


@cute.jit
def keys_of(config: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, token: Int32, part: Int32):
    """The keys of a token, and the range of them of CTA ``part``."""
    n, zero = scalars, Int32(0)
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
    share = share_of(scalars, total)
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
def without_end(tensors: Tensors, scalars: Scalars, keys: Keys, token: Int32):
    """Trim trailing indices that are invalid, as lists of a prefill's first tokens have. A warp scans from the end, as
    many as its loads cover at once."""
    last, rest = Int32(-1), cutlass.select_(scalars.has_list != 0, keys.far_count, Int32(0))
    while (last < 0) & (rest > 0):
        first = cutlass.max(rest - _LOOKED_AT * WARP, Int32(0))
        for i in cutlass.range_constexpr(_LOOKED_AT):
            n = first + i * WARP + cute.arch.lane_idx()
            entry = _listed(tensors, token, cutlass.min(n, rest - 1))
            last = cutlass.select_((n < rest) & (Uint32(entry) < Uint32(keys.limit)), n, last)
        last = cute.arch.warp_redux_sync(last, "max")
        rest = first
    stop = keys.stop
    if scalars.has_list != 0:
        stop = keys.near_count + last + 1
    return Keys(
        keys.near, keys.near_first, keys.near_count, keys.far, keys.far_count, keys.limit, keys.first,
        cutlass.min(stop, keys.stop),
    )  # fmt: skip


def _row(cache: cute.Tensor, request: Int32, key: Int32) -> Int64:
    """Address of a key's row, or of a request's row in a block table."""
    size = cache.element_type.width // 8
    offset = Int64(cache.stride[0]) * request + Int64(cache.stride[1]) * key
    return cache.iterator.toint() + offset * size


class Guess(NamedTuple):
    """An index loaded before the window's length is known, as if the window were full."""

    near_count: Int32
    entry: Int32


@cute.jit
def guess_of(tensors: Tensors, scalars: Scalars, token: Int32, part: Int32, key: Int32):
    """For a key counted from the CTA's first. With few tokens load latency counts: window end and index are loaded
    together."""
    near = cutlass.min(scalars.window, scalars.capacity)
    far, entry = share_of(scalars, near + scalars.listed) * part + key - near, Int32(0)
    if (scalars.has_list != 0) & (Uint32(far) < Uint32(scalars.listed)):
        entry = _listed(tensors, token, far)
    return Guess(near, entry)


def share_of(scalars: Scalars, keys: Int32) -> Int32:
    """Keys of each CTA of a work tile."""
    step = scalars.ctas * scalars.groups * ALIGNED
    return (keys + step - 1) // step * ALIGNED


def _listed(tensors: Tensors, token: Int32, n: Int32) -> Int32:
    """Index n of a token's list."""
    indices = tensors.indices
    at = Int64(indices.stride[0]) * token + Int64(indices.stride[1]) * n
    return op.load_pair(indices.iterator.toint() + at * 4)


@cute.jit
def entry_of(tensors: Tensors, scalars: Scalars, keys: Keys, token: Int32, key: Int32):
    """Entry of a token's key; nothing here waits for the load."""
    entry = key - keys.near_count
    if (scalars.has_list != 0) & (entry >= 0) & (key < keys.stop):
        entry = _listed(tensors, token, entry)
    return entry


@cute.jit
def first_entry_of(tensors: Tensors, scalars: Scalars, keys: Keys, token: Int32, key: Int32, guess: Guess):
    """The same from a guess, if it was right."""
    entry = guess.entry
    if (scalars.has_list == 0) | (keys.near_count != guess.near_count):
        entry = entry_of(tensors, scalars, keys, token, key)
    return entry


@cute.jit
def row_of(config: cutlass.Constexpr, tensors: Tensors, keys: Keys, key: Int32, entry: Int32):
    """Row of a token's key, from the window or the entries; invalid past the CTA's range."""
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
    """Row of a request's key by block table, whose row is at ``pages``. Invalid pages have no keys."""
    size = Uint32(Int32(cache.shape[1]))
    number = Uint32(key) // size
    page = Int32(-1)
    if counts:
        page = op.load_pair(pages + Int64(table.stride[1]) * Int64(number) * 4)
    known = (page >= 0) & (page < cache.shape[0])
    page = cutlass.select_(known, page, Int32(0))
    return Row(_row(cache, page, Int32(Uint32(key) - number * size)), known)


@dsl_user_op
def _joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """64 bits from two registers."""
    return asm(Int64, [low, high], "mov.b64 $0, {$1, $2};", loc=loc, ip=ip)


def held_by(lane: Any, address: Int64) -> Int64:
    """``address`` of another lane of the warp."""
    return _joined(cute.arch.shuffle_sync(Int32(address), lane), cute.arch.shuffle_sync(Int32(address >> 32), lane))
