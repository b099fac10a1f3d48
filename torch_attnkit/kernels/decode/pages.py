"""Where the keys of a tile are in a cache of pages.

Lengths and tables may say anything: a page that is not in the cache is never read, and neither is the table beyond its
columns. The lanes of a warp look up a page each; -1 stands for "none to read".
"""

# (Traced by CuTeDSL, whose decorators are untyped.)

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op

from .arguments import Tensors


@cute.jit
def _looked_up(tensors: Tensors, b: Int32, logical: Int32, seen: Boolean):
    """Entry ``logical`` of a sequence's row of the table, where it is ``seen`` and there."""
    page = Int32(-1)
    if seen & (logical < Int32(tensors.table.shape[1])):
        page = op.load_pair(tensors.table.iterator.toint() + (Int64(tensors.table.stride[0]) * b + logical) * 4)
    known = (page >= 0) & (page < Int32(tensors.k.shape[0]))
    return cutlass.select_(known, page, Int32(-1))


@cute.jit
def of_keys(
    tensors: Tensors, b: Int32, first: Int32, low: Int32, high: Int32, keys: cutlass.Constexpr, page: cutlass.Constexpr
):
    """Lane l: the page of key l of a tile of ``keys``, from key ``first`` on, of which [low, high) count."""
    row = cute.arch.lane_idx() % keys
    logical = first // page if const_expr(page % keys == 0) else (first + row) // page
    inside = (row >= low) & (row < high)
    if const_expr(page % keys == 0):
        inside = (low < keys) & (high > 0)
    return _looked_up(tensors, b, logical, inside)


@cute.jit
def of_tile(tensors: Tensors, b: Int32, first: Int32, low: Int32, high: Int32, page: cutlass.Constexpr):
    """Lane l: the l-th page of a tile."""
    logical = first // page + cute.arch.lane_idx()
    begin = logical * page - first
    return _looked_up(tensors, b, logical, (begin < high) & (begin + page > low))


@cute.jit
def of_boxes(
    tensors: Tensors, b: Int32, first: Int32, low: Int32, high: Int32, box: cutlass.Constexpr, boxes: cutlass.Constexpr,
    page: cutlass.Constexpr,
):  # fmt: skip
    """Lane l: the page of a tile's l-th box of ``box`` keys, which lies in one; bounds are counted from key 0.

    TMA gives zeros for page -1, which is outside of any cache.
    """
    begin = first + cute.arch.lane_idx() * box
    seen = (cute.arch.lane_idx() < boxes) & (begin < high) & (begin + box > low)
    return _looked_up(tensors, b, begin // page, seen)
