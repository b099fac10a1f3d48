"""Heads and boxes of the Blackwell kernel for blocks of queries over pages. Imports no cutlass."""

from __future__ import annotations

import math

from . import plan

# Of one CTA; two CTAs, of D 512, have pieces of blocks in their stages.
HEADS = tuple(heads for heads, tiles in plan.TILES.items() if tiles.ctas == 1)
# Keys that a box has at least: what 128 bytes of shared memory are swizzled by.
LEAST_BOX = 8


def box_of(page: int, heads: tuple[int, int]) -> int:
    """Keys that TMA loads at once: boxes divide a page, a multiple of ``LEAST_BOX``, and a block."""
    return math.gcd(page, plan.TILES[heads].tile_n)
