"""How routed experts are cut on Hopper. Imports no cutlass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..problem import Problem, Weights
from .config import MOST_COLUMNS, ROWS, WIDTHS

MOST_EXPERTS = 1 << 15  # whose counts one block keeps in shared memory
_LEAST_EXPERTS = 1 << 10


@dataclass(frozen=True)
class Plan:
    columns: int  # most tokens of a work tile
    experts: int  # room for so many
    tiles: int  # at most, of tokens
    up_blocks: int
    down_blocks: int
    row_tiles: int  # of the down product
    scale_vectors: tuple[int, int]


def plan(problem: Problem, sms: int) -> Plan:
    p = problem
    columns = next((8 * w for w in WIDTHS if 8 * w >= p.tokens), MOST_COLUMNS)
    tiles = p.slots // columns + min(p.experts, p.slots)
    up_tiles, down_tiles = -(-p.up.rows // ROWS), -(-p.down.rows // ROWS)
    return Plan(
        columns=columns,
        experts=max(_LEAST_EXPERTS, 1 << (p.experts - 1).bit_length()),
        tiles=tiles,
        up_blocks=min(sms, tiles * up_tiles),
        down_blocks=min(sms, tiles * down_tiles),
        row_tiles=down_tiles,
        scale_vectors=(_vector(p, p.up), _vector(p, p.down)),
    )


def _vector(p: Problem, weights: Weights) -> int:
    """Bytes of scales that start and end where a load of so many can: 16, 8, 4, 2 or 1."""
    if p.scale_layout != "linear":
        return 4
    stage = {"nvfp4": 16, "mxfp4": 8}[p.format]
    blocks = weights.columns // {"nvfp4": 16, "mxfp4": 32}[p.format]
    return math.gcd(stage, blocks, weights.scale_row, weights.scale_expert)
