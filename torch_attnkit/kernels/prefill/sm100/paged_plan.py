"""Boxes of the Blackwell kernel for blocks of queries over pages."""

from __future__ import annotations

import math

from ..problem import Layout
from . import plan

# Keys that a box has at least: what 128 bytes of shared memory are swizzled by.
LEAST_BOX = 8
# What numbers of rows are counted in.
_MOST_ROWS = 2**31 - 1


def box_of(page: int, heads: tuple[int, int]) -> int:
    """Keys that TMA loads at once: boxes divide a page and a CTA's share of a block. 0: rows are gathered."""
    box = math.gcd(page, plan.TILES[heads].tile_n // plan.TILES[heads].ctas)
    return box if box >= LEAST_BOX else 0


def rows_of(layout: Layout) -> tuple[int, int] | None:
    """Pages (Np, Ps, Hkv, D) as a matrix of rows at one distance, of which each head of a key is one: how many there
    are, and the distance. Rows overlap where pages, keys and heads are no multiples of D apart. None: there are more
    than can be counted."""
    *sizes, dim = layout.shape
    axes = [(size - 1, stride) for size, stride in zip(sizes, layout.strides[:-1], strict=True) if size > 1]
    step = math.gcd(*(stride for _, stride in axes)) or dim
    rows = 1 + sum(last * stride for last, stride in axes) // step
    return (rows, step) if rows <= _MOST_ROWS else None
