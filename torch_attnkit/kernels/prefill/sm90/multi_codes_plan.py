"""Host side of ``multi_codes.py``: tiles per head size, how many CTAs share a tile's keys, and whose calls they are.

Tiles are modelled.
"""

from __future__ import annotations

from typing import Any

from ..problem import Problem
from . import codes_plan, multi_plan
from .multi_plan import Choice, Plan, Tiles

# Rows, queries times the query heads of a KV head, up to which keys cross memory once rather than once a head. H100,
# 32/8 heads, D 128, 16 x 64 queries over 8192 keys 226 us for 432; but 4 x 2048 over 8192 1561 for 1218.
MOST_ROWS = 256
_PROMOTED = 128  # columns of V up to which a thread has registers for a block's share of the output, too


# Stages are those of K and of V as it comes; V turned around has two, ``turned`` of the kernel's Config. Up to 64 rows
# what two CTAs of a multiprocessor have room for; more, beyond D 64, 96 keys, as for windows in ``codes_plan.py``. Keys
# are multiples of 32, which a product takes.
CODES = codes_plan.CODES
TILES = {
    # (D, Dv), those of codes_plan.py
    (32, 32): Choice(Tiles(64, 128, 4, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (64, 64): Choice(Tiles(64, 128, 4, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (96, 96): Choice(Tiles(64, 64, 4, 2), Tiles(128, 96, 4), Tiles(128, 96, 4, pair=True)),
    (128, 128): Choice(Tiles(64, 64, 4, 2), Tiles(128, 96, 4), Tiles(128, 96, 4, pair=True)),
    (192, 128): Choice(Tiles(64, 96, 4), Tiles(128, 96, 3), Tiles(128, 96, 3, pair=True)),
    (256, 256): Choice(Tiles(64, 64, 4), Tiles(128, 96, 2), Tiles(128, 96, 2, turns=False, pair=True)),
}


def serves(problem: Problem, sms: int) -> bool:
    """Whether ``multi_codes.py`` solves ``problem``, not the dense kernel behind a transposition of V: where rows are
    few, and where the tiles of that, of one head each, would leave half of the multiprocessors idle."""
    p = problem
    dense = p.batch * p.heads * -(-p.queries // codes_plan.tiles(p).tile_m)
    return p.queries * p.group <= MOST_ROWS or 2 * dense <= sms


def plan(problem: Problem, sms: int) -> Plan:
    """Tiles and clusters by the model of 16 bits."""
    return multi_plan.plan(problem, sms, TILES)


def signature(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return multi_plan.signature(problem, tiles) | {"promote": problem.dim_v <= _PROMOTED}
