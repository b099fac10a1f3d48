"""Host side of the kernel for blocks of queries over pages: tiles, clusters, and how keys are loaded.

Knows sizes alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..paged import Problem
from . import multi_plan
from .multi_plan import Tiles

_LEAST_BOX = 8  # keys: what 128 bytes of shared memory are swizzled by. Smaller boxes are rows, which threads copy.
_MOST_BOX = 128
# Tiles of persistent CTAs that draw them. Those of D 128 and of 192/128 on an H100 2 % over turns, the others over the
# same without turns; of D 32 to 96 6 to 10 % over M 128, of D 256 7 % over N 64 (docs/lab/prefill.md).
DRAWN = {
    (32, 32): Tiles(192, 128, 4),
    (64, 64): Tiles(192, 128, 4),
    (96, 96): Tiles(192, 96, 3),
    (128, 128): Tiles(128, 128, 2, turns=False),
    (192, 128): Tiles(128, 128, 2, turns=False),
    (256, 256): Tiles(128, 80, 2, late_rescale=True),
}
_FILLED = 7 / 8  # of a drawn tile's rows, which whole queries fill as far as a KV head's query heads allow
# Tiles of rows of a sequence from which on pairs of CTAs pay: they are 2 % faster than CTAs of one tile each, but the
# last of them is half empty more often, which is half a tile of each sequence, modelled.
_PAIRED = 24
_MOST_CTAS = 8  # of a cluster; every GPU takes so many


class Plan(NamedTuple):
    tiles: Tiles
    ctas: int  # of a cluster
    box: int  # keys that TMA loads at once, of one page; 0: every thread copies 16 bytes of a row at a time
    persistent: int = 0  # as in multi_plan.py
    dynamic: int = 0  # persistent CTAs that draw their work tiles


def box_of(page: int, tiles: Tiles) -> int:
    """Boxes divide a page and a tile, of which each CTA of a pair loads its half."""
    box = math.gcd(page, tiles.tile_n // (2 if tiles.pair else 1), _MOST_BOX)
    return box if box >= _LEAST_BOX else 0


def plan(
    problem: Problem,
    sms: int,
    choices: dict[tuple[int, int], multi_plan.Choice] = multi_plan.TILES,
    drawn: dict[tuple[int, int], Tiles] = DRAWN,
) -> Plan:
    """The tiles of ``problem`` on ``sms`` multiprocessors; a tile's rows are queries times a KV head's query heads.

    How long which sequence is only the device knows. Blocks of queries count as equally long, which decides between
    tiles, and sequences as long as the longest, which decides on clusters. Without ``drawn`` no CTA draws.
    """
    p = problem.attention
    choice = choices[p.dim, p.dim_v]
    sequences = max(1, p.batch)
    rows = max(1, min(p.longest, -(-p.queries // sequences))) * p.group
    tiles = choice.few if p.longest * p.group <= choice.few.tile_m else choice.many
    # Where threads copy rows, a scheduler beside them would spill.
    if tiles is choice.few and multi_plan.shares(p, problem.longest_keys, sms) and box_of(problem.page, tiles):
        return Plan(tiles, 1, box_of(problem.page, tiles), sms)
    row_tiles, groups = -(-rows // tiles.tile_m), sequences * p.kv_heads
    seen = p.scores.most_keys(problem.longest_keys, p.longest)
    steps, dims = max(1, -(-seen // tiles.tile_n)), (p.dim + p.dim_v) * p.dtype.itemsize // 2
    most = min(_MOST_CTAS, steps)
    ctas = min(range(1, most + 1), key=lambda n: multi_plan.cost(tiles, n, row_tiles, groups, steps, dims, sms))
    if ctas == 1 and tiles is choice.many:
        draws = drawn.get((p.dim, p.dim_v))
        if draws and box_of(problem.page, draws) and row_tiles * groups > sms and fills(draws, p.group):
            return Plan(draws, 1, box_of(problem.page, draws), dynamic=sms)
        # A pair needs keys that both have, by TMA.
        if rows > _PAIRED * choice.pair.tile_m and box_of(problem.page, choice.pair):
            return Plan(choice.pair, 2, box_of(problem.page, choice.pair))
    return Plan(tiles, ctas, box_of(problem.page, tiles))


def signature(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What a kernel is compiled for."""
    pages = {"page": problem.page, "box": plan.box, "group": problem.attention.group if plan.dynamic else 0}
    return multi_plan.signature(problem.attention, plan.tiles) | pages


def fills(tiles: Tiles, group: int) -> bool:
    return tiles.tile_m // group * group >= _FILLED * tiles.tile_m
