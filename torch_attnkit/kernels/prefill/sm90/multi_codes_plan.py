"""Host side of ``multi_codes.py``: tiles per head size, how many CTAs share a tile's keys, and whose calls they are.

Modelled, not timed. Imports no cutlass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_attnkit.core.spec import short

from ..problem import Problem
from . import codes_plan
from .multi_plan import at_once

# Rows, queries times the query heads of a KV head, up to which a call waits for memory, so that keys must cross it once
# and nothing is gained by the tiles of a dense batch.
MOST_ROWS = 256
_PROMOTED = 128  # columns of V up to which a thread has registers for a block's share of the output, too


class Tiles(NamedTuple):
    """M rows by N keys, depth of the rings of K and of V as it comes and of V turned around, CTAs on a multiprocessor,
    and choices as in ``multi_plan.py``."""

    tile_m: int
    tile_n: int
    stages: int
    turned: int = 2
    per_sm: int = 1
    turns: bool = True
    pair: bool = False


class Choice(NamedTuple):
    """Tiles for up to 64 rows, which wait for memory, for more, and for so many that they fill the machine."""

    few: Tiles
    many: Tiles
    pair: Tiles


# 64 rows: what two CTAs of a multiprocessor have room for. More: masks are numbers here, so that up to 96 keys of heads
# beyond 64 leave them registers, as for windows in ``codes_plan.py``. Keys are multiples of 32, which a product takes.
TILES = {
    # (D, Dv), those of codes_plan.py
    (32, 32): Choice(Tiles(64, 128, 4, 2, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (64, 64): Choice(Tiles(64, 128, 4, 2, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (96, 96): Choice(Tiles(64, 64, 4, 2, 2), Tiles(128, 96, 4), Tiles(128, 96, 4, pair=True)),
    (128, 128): Choice(Tiles(64, 64, 4, 2, 2), Tiles(128, 96, 4), Tiles(128, 96, 4, pair=True)),
    (192, 128): Choice(Tiles(64, 96, 4), Tiles(128, 96, 3), Tiles(128, 96, 3, pair=True)),
    (256, 256): Choice(Tiles(64, 64, 4), Tiles(128, 96, 2), Tiles(128, 96, 2, turns=False, pair=True)),
}

_MOST_CTAS = 8  # of a cluster; every GPU takes so many
# As in ``multi_plan.py``, whose numbers of memory stand for any bytes: for each multiprocessor and microsecond, KB and
# MFLOP. E4M3 was at 850 TFLOP/s at best in ``codes.py``, which is 6.4; a single consumer waits for its softmax.
_COPIES, _MEMORY, _PRODUCTS = 50.0, 32.0, 6.4
_START, _MERGE = 5.0, 1.0  # microseconds of a CTA beside its blocks, and of a cluster's merge


class Plan(NamedTuple):
    tiles: Tiles
    ctas: int  # of a cluster
    persistent: int = 0  # as in ``multi_plan.Plan``


def serves(problem: Problem, sms: int) -> bool:
    """Whether ``multi_codes.py`` solves ``problem``, not the dense kernel behind a transposition of V: where rows are
    few, and where the tiles of that, of one head each, would leave multiprocessors idle."""
    p = problem
    dense = p.batch * p.heads * -(-p.queries // codes_plan.tiles(p).tile_m)
    return p.queries * p.group <= MOST_ROWS or dense < sms


def cost(tiles: Tiles, ctas: int, row_tiles: int, groups: int, steps: int, dims: int, sms: int) -> float:
    """Microseconds, roughly, of ``groups`` KV heads with ``row_tiles`` tiles each that visit ``steps`` blocks."""
    total, size = row_tiles * groups, tiles.tile_n * dims * 1e-3
    together = 1 if total <= at_once(ctas, sms, 1) else tiles.per_sm  # on the fullest multiprocessor
    running = min(total * ctas, sms * tiles.per_sm)
    step = max(
        size * together / _COPIES,
        size * running / row_tiles / (_MEMORY * sms),
        tiles.tile_m * tiles.tile_n * dims * 2e-6 * together / _PRODUCTS,
    )
    rounds = -(-total // max(1, at_once(ctas, sms, tiles.per_sm)))
    return rounds * (_START + -(-steps // ctas) * step) + (_MERGE if ctas > 1 else 0.0)


def plan(problem: Problem, sms: int) -> Plan:
    """The tiles of ``problem`` on ``sms`` multiprocessors; a tile's rows are queries times a KV head's query heads."""
    rows, groups = problem.queries * problem.group, problem.batch * problem.kv_heads
    choice = TILES[problem.dim, problem.dim_v]
    tiles = choice.few if rows <= 64 else choice.many
    row_tiles = -(-rows // tiles.tile_m)
    if row_tiles == 1 and problem.batch > 1:  # whose lengths may be anything
        return Plan(tiles, 1, sms * tiles.per_sm)
    steps = max(1, -(-problem.scores.most_keys(problem.keys, problem.queries) // tiles.tile_n))
    dims = problem.dim + problem.dim_v
    ctas = min(range(1, _MOST_CTAS + 1), key=lambda n: cost(tiles, n, row_tiles, groups, steps, dims, sms))
    if ctas == 1 and tiles is choice.many and row_tiles % 2 == 0:
        return Plan(choice.pair, 2)
    return Plan(tiles, ctas)


def signature(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """A kernel's signature."""
    p = problem
    return {
        "dtype": short(p.dtype),
        "dim": p.dim,
        "dim_v": p.dim_v,
        "softcap": p.scores.capped,
        "promote": p.dim_v <= _PROMOTED,
        **tiles._asdict(),
    }
