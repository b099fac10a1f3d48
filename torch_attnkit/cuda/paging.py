"""Block-table lookups: the pages that hold the keys of a tile.

A warp looks pages up together, one a lane, and shuffles them to where they are used; -1 stands for "no page". Lengths
and tables may hold anything: neither the table beyond its columns nor a page that is not in the cache is ever read.
"""

# (Traced by CuTeDSL, whose decorators are untyped.)

from __future__ import annotations

from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op


class PagedCache(Protocol):
    """The tensors of a call that has pages."""

    @property
    def k(self) -> cute.Tensor: ...  # (Np, ...)
    @property
    def table(self) -> cute.Tensor | None: ...  # (B, Mp)


@cute.jit
def _lookup(tensors: PagedCache, b: Int32, logical: Int32, needed: Boolean):
    """Entry ``logical`` of sequence ``b``'s row of the table; -1 where it is not ``needed`` or no page of the cache."""
    page = Int32(-1)
    if needed & (logical < Int32(tensors.table.shape[1])):
        page = op.load_pair(tensors.table.iterator.toint() + (Int64(tensors.table.stride[0]) * b + logical) * 4)
    known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
    return cutlass.select_(known, page, Int32(-1))


@cute.jit
def of_keys(
    tensors: PagedCache, b: Int32, first: Int32, low: Int32, high: Int32, keys: cutlass.Constexpr,
    page: cutlass.Constexpr,
):  # fmt: skip
    """Lane l: the page of key l of a tile of ``keys`` from key ``first`` on, of which [low, high) count."""
    row = cute.arch.lane_idx() % keys
    logical = first // page if const_expr(page % keys == 0) else (first + row) // page
    inside = (row >= low) & (row < high)
    if const_expr(page % keys == 0):
        inside = (low < keys) & (high > 0)
    return _lookup(tensors, b, logical, inside)


@cute.jit
def of_tile(tensors: PagedCache, b: Int32, first: Int32, low: Int32, high: Int32, page: cutlass.Constexpr):
    """Lane l: the l-th page of a tile."""
    logical = first // page + cute.arch.lane_idx()
    begin = logical * page - first
    return _lookup(tensors, b, logical, (begin < high) & (begin + page > low))


@cute.jit
def of_boxes(
    tensors: PagedCache, b: Int32, first: Int32, low: Int32, high: Int32, box: cutlass.Constexpr,
    boxes: cutlass.Constexpr, page: cutlass.Constexpr,
):  # fmt: skip
    """Lane l: the page of a tile's l-th TMA box of ``box`` keys, which lies in one; bounds count from key 0.

    TMA zero-fills a box of page -1, which is out of bounds in any cache.
    """
    begin = first + cute.arch.lane_idx() * box
    needed = (cute.arch.lane_idx() < boxes) & (begin < high) & (begin + box > low)
    return _lookup(tensors, b, begin // page, needed)
