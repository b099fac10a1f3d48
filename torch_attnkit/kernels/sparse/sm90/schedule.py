"""Which keys a token has, and how CTAs go through the work tiles. Imports cutlass.

A token's keys are counted through: first those of its window, then its entries. Ends, lengths, requests and lists may
say anything: what is not there does not count, and is never read.
"""

# (Traced by CuTeDSL, whose decorators are untyped.)

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.kernels.decode.sm90.config import HEADS

from .arguments import Numbers, Tensors
from .plan import ALIGNED


class WorkTile(NamedTuple):
    """Up to 64 heads of a token."""

    token: Int32
    head: Int32  # the first
    heads: Int32


class Keys(NamedTuple):
    """The keys of a token, and those of them, [first, stop), that a CTA attends."""

    near: Int64  # address of the window's first
    near_count: Int32
    far: Int64  # address of the request's first entry
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
def keys_of(tensors: Tensors, numbers: Numbers, token: Int32, part: Int32):
    """The keys of a token, of which CTA ``part`` of those that share it has a share."""
    n, zero = numbers, Int32(0)
    request = token // n.tokens_each
    if n.has_requests != 0:
        request = tensors.request[token]
    size = Int32(tensors.near.shape[1])
    end = cutlass.min(cutlass.max(tensors.end[token], zero), size)
    near = cutlass.min(n.window, end)
    limit = n.entries
    if n.has_length != 0:
        limit = cutlass.min(cutlass.max(tensors.length[token], zero), n.entries)
    far = cutlass.select_(n.has_list != 0, n.listed, limit)
    known = Uint32(request) < Uint32(Int32(tensors.near.shape[0]))
    near, far = cutlass.select_(known, near, zero), cutlass.select_(known, far, zero)
    request = cutlass.select_(known, request, zero)
    total = near + far
    share = share_of(numbers, total)
    first = cutlass.min(share * part, total)
    return Keys(
        _row(tensors.near, request, end - near),
        near,
        _row(tensors.far, request, zero),
        far,
        limit,
        first,
        cutlass.min(first + share, total),
    )


def _row(cache: cute.Tensor, request: Int32, key: Int32) -> Int64:
    """Its address."""
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
    near = cutlass.min(numbers.window, Int32(tensors.near.shape[1]))
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


def row_of(tensors: Tensors, keys: Keys, key: Int32, entry: Int32) -> Row:
    """Where the token's key of that number is, in the window or among the entries; beyond the CTA's share none."""
    size = tensors.near.element_type.width // 8
    near = keys.near + Int64(tensors.near.stride[1]) * key * size
    far = keys.far + Int64(tensors.far.stride[1]) * entry * size
    is_near = key < keys.near_count
    counts = (key < keys.stop) & (is_near | (Uint32(entry) < Uint32(keys.limit)))
    return Row(cutlass.select_(is_near, near, far), counts)
