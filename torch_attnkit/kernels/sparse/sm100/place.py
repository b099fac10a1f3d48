"""Where a CTA stands: its heads, and its share of the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..sm90.arguments import Numbers, Tensors
from ..sm90.schedule import keys_of
from .config import KEYS, LANES, LOADERS, Config
from .row_numbers import Matrices, row_keys_of


class Place(NamedTuple):
    """A cluster has ``splits`` shares of a work tile's keys, each on all its sides; CTAs of a share are neighbours."""

    work: Int32  # the number of the work tile
    token: Int32
    head: Int32  # of the CTA's heads the first
    heads: Int32  # of them
    side: Any
    split: Int32  # which share of the cluster's
    splits: Int32
    group: Int32  # which cluster of the work tile
    row: Int32  # the first of the CTA's heads that it combines
    rows: Int32  # of them

    @property
    def part(self) -> Int32:
        """Which of all shares of the work tile's keys."""
        return self.group * self.splits + self.split


def place_of(config: Config, tensors: Tensors, numbers: Numbers) -> Place:
    """Work tiles of a token follow one another: what one loads the L2 has for the others."""
    c = config
    rank, cluster = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.block_idx()[0]) // (numbers.ctas * c.sides)
    side, split = (rank % c.sides, rank // c.sides) if const_expr(c.sides > 1) else (0, rank)
    work, group = Int32(cluster // Uint32(numbers.groups)), Int32(cluster % Uint32(numbers.groups))
    blocks = Uint32(numbers.head_blocks)
    token, block = Int32(Uint32(work) // blocks), Int32(Uint32(work) % blocks)
    head = (block * c.sides + side) * c.heads
    heads = cutlass.max(cutlass.min(Int32(tensors.q.shape[1]) - head, c.heads), 0)
    row = heads * split // numbers.ctas
    rows = heads * (split + 1) // numbers.ctas - row
    return Place(work, token, head, heads, side, split, numbers.ctas, group, row, rows)


def own_warp() -> Int32:
    """Which of the producer's this is."""
    return cute.arch.warp_idx() % LOADERS


def own_row() -> Int32:
    """Which of a tile a lane of the producer has."""
    lane, each = cute.arch.lane_idx(), LANES // 2
    return lane // each * (KEYS // 2) + own_warp() * each + lane % each


def tiles_of(config: Config, tensors: Tensors, numbers: Numbers, matrices: Matrices | None, place: Place) -> Int32:
    """Of the CTA's share of the keys."""
    if const_expr(config.grouped):
        keys = row_keys_of(config, tensors, numbers, matrices, place.token, place.part).keys
    else:
        keys = keys_of(config, tensors, numbers, place.token, place.part)
    return cute.arch.make_warp_uniform((keys.stop - keys.first + (KEYS - 1)) // KEYS)
