"""How routed experts are cut on Hopper. Imports no cutlass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..problem import BLOCK, Problem, Weights
from .config import BOX, CONSUMERS, MOST_COLUMNS, WARP_ROWS, WIDTHS

MOST_EXPERTS = 1 << 15  # whose counts one block keeps in shared memory
_LEAST_EXPERTS = 1 << 10
_ROOM = (
    1.5  # tokens of a work tile, in units of an expert's mean (H200: 18 % faster than 64 at 128 tokens of 256 experts)
)
_COST = {8: 1.0, 4: 1.02, 2: 1.05}  # of a work tile's time by row_warps (measurement H200)


@dataclass(frozen=True)
class Plan:
    columns: int  # most tokens of a work tile
    experts: int  # room for so many
    tiles: int  # at most, of tokens
    up_blocks: int
    down_blocks: int
    row_tiles: int  # of the down product
    row_warps: tuple[int, int]
    scale_vectors: tuple[int, int]


def plan(problem: Problem, sms: int) -> Plan:
    p = problem
    wanted = min(p.tokens, _ROOM * p.slots / p.experts)
    columns = next((8 * w for w in WIDTHS if 8 * w >= wanted), MOST_COLUMNS)
    tiles = p.slots // columns + min(p.experts, p.slots)
    row_warps = tuple(_row_warps(w, tiles, sms) for w in (p.up, p.down))
    up_tiles, down_tiles = (
        -(-w.rows // (WARP_ROWS * warps)) for w, warps in zip((p.up, p.down), row_warps, strict=True)
    )
    return Plan(
        columns=columns,
        experts=max(_LEAST_EXPERTS, 1 << (p.experts - 1).bit_length()),
        tiles=tiles,
        up_blocks=min(sms, tiles * up_tiles),
        down_blocks=min(sms, tiles * down_tiles),
        row_tiles=down_tiles,
        row_warps=row_warps,
        scale_vectors=(_vector(p, p.up), _vector(p, p.down)),
    )


def _row_warps(weights: Weights, tiles: int, sms: int) -> int:
    """Rows of a work tile, by the share of the multiprocessors that have work to the end; few rows load less well."""

    def idle(warps: int) -> float:
        units = tiles * -(-weights.rows // (WARP_ROWS * warps))
        return -(-units // sms) * sms / units

    return min((CONSUMERS, 4, 2), key=lambda warps: idle(warps) * _COST[warps])


def _vector(p: Problem, weights: Weights) -> int:
    """Bytes of scales that start and end where a load of so many can: 16, 8, 4, 2 or 1."""
    if p.scale_layout != "linear":
        return math.gcd(4, weights.scale_row, weights.scale_expert)
    blocks = weights.columns // BLOCK[p.format]
    return math.gcd(BOX // BLOCK[p.format], blocks, weights.scale_row, weights.scale_expert)
