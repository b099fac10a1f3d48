"""Host side of the kernel for blocks of queries: tiles per head size, and how many CTAs share a tile's keys.

Knows sizes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_attnkit.core.spec import short

from ..problem import Problem
from . import plan as dense
from .clusters import at_once


class Tiles(NamedTuple):
    """M rows by N keys, depth of the rings, CTAs on a multiprocessor, and choices of ``kernels/prefill/sm90/multi.py``.

    ``turns``: consumers issue their products in turn. ``late_rescale``: the output is rescaled while the scores of the
    next block are computed rather than before. ``pair``: two CTAs on neighbouring tiles load half of every block each.
    """

    tile_m: int
    tile_n: int
    stages: int
    per_sm: int = 1
    turns: bool = True
    late_rescale: bool = False
    pair: bool = False


class Choice(NamedTuple):
    """Tiles for up to 64 rows, which wait for memory, for more, and for so many that they fill the machine."""

    few: Tiles
    many: Tiles
    pair: Tiles


DTYPES = dense.DTYPES
# D 128 on an H200: few 1 % over one CTA a multiprocessor, many 3 % over three stages, pair 2 % over no pairs or two
# stages, 4 % over N 96 (docs/lab/prefill.md). The other head sizes follow it and plan.py, and were not timed.
TILES = {
    # (D, Dv), multiples of the same numbers as in plan.py
    (32, 32): Choice(Tiles(64, 128, 4, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (64, 64): Choice(Tiles(64, 128, 3, 2), Tiles(128, 128, 4), Tiles(128, 128, 4, pair=True)),
    (96, 96): Choice(Tiles(64, 64, 4, 2), Tiles(128, 128, 2), Tiles(128, 128, 3, pair=True)),
    (128, 128): Choice(Tiles(64, 64, 3, 2), Tiles(128, 128, 2), Tiles(128, 128, 3, turns=False, pair=True)),
    (192, 128): Choice(Tiles(64, 64, 4), Tiles(128, 128, 2), Tiles(128, 128, 2, turns=False, pair=True)),
    (256, 256): Choice(
        Tiles(64, 64, 3), Tiles(128, 64, 2, late_rescale=True), Tiles(128, 64, 2, late_rescale=True, pair=True)
    ),
}

# Of persistent CTAs: bytes of keys and values that take as long as a work tile's start and end; how many tiles for each
# multiprocessor, and of how many keys, they are used from. docs/lab/prefill.md has the times.
_START_BYTES, _SHARED_FROM, _SHARED_KEYS = 128 << 10, 0.45, 4096
_MOST_CTAS = 8  # of a cluster; every GPU takes so many
# For each multiprocessor and microsecond, in KB and MFLOP: what its copies bring, its share of device memory, what its
# tensor cores do. Fitted to the H200's times of 16 and 64 queries at B 1 to 16 with all cluster sizes, to about 10 %.
_COPIES, _MEMORY, _PRODUCTS = 50.0, 32.0, 7.5
_START, _MERGE = 5.0, 1.0  # microseconds of a CTA beside its blocks, and of a cluster's merge


class Plan(NamedTuple):
    tiles: Tiles
    ctas: int  # of a cluster
    persistent: int = 0  # CTAs with equal runs of all blocks of keys; 0: a cluster has a work tile


def split_floats(tile_m: int, dim_v: int) -> int:
    """Of a split in device memory: its rows' numerators, then a maximum, in powers of two, and a sum of each."""
    return tile_m * (dim_v + 2)


def start(tiles: Tiles, row_bytes: int) -> int:
    """Blocks of keys that take persistent CTAs as long as a work tile's start and end; ``row_bytes`` of a key and a
    value."""
    return -(-_START_BYTES // (tiles.tile_n * row_bytes))


def shares(problem: Problem, keys: int, sms: int) -> bool:
    """Whether persistent CTAs share the keys of all sequences, whose lengths may differ; a tile has all rows of one.

    Fewer tiles, or sequences of at most fewer ``keys``, are faster as clusters; D 256 would spill.
    """
    tiles = problem.batch * problem.kv_heads
    enough = tiles >= _SHARED_FROM * sms and problem.scores.most_keys(keys, problem.longest) >= _SHARED_KEYS
    return problem.batch > 1 and problem.dim_v <= 128 and enough


def signature(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """What a kernel is compiled for."""
    p = problem
    return {
        "dtype": short(p.dtype), "dim": p.dim, "dim_v": p.dim_v, "softcap": p.scores.capped, **tiles._asdict()
    }  # fmt: skip


def cost(tiles: Tiles, ctas: int, row_tiles: int, groups: int, steps: int, dims: int, sms: int) -> float:
    """Microseconds, roughly, of ``groups`` KV heads with ``row_tiles`` tiles each that visit ``steps`` blocks."""
    total, size = row_tiles * groups, tiles.tile_n * dims * 2e-3
    together = 1 if total <= at_once(ctas, sms, 1) else tiles.per_sm  # on the fullest multiprocessor
    running = min(total * ctas, sms * tiles.per_sm)
    step = max(
        size * together / _COPIES,
        size * running / row_tiles / (_MEMORY * sms),
        tiles.tile_m * tiles.tile_n * dims * 2e-6 * together / _PRODUCTS,
    )
    rounds = -(-total // max(1, at_once(ctas, sms, tiles.per_sm)))
    return rounds * (_START + -(-steps // ctas) * step) + (_MERGE if ctas > 1 else 0.0)


def plan(problem: Problem, sms: int, choices: dict[tuple[int, int], Choice] = TILES) -> Plan:
    """The tiles of ``problem`` on ``sms`` multiprocessors; a tile's rows are queries times a KV head's query heads."""
    rows, groups = problem.queries * problem.group, problem.batch * problem.kv_heads
    choice = choices[problem.dim, problem.dim_v]
    tiles = choice.few if rows <= 64 else choice.many
    row_tiles = -(-rows // tiles.tile_m)
    if rows <= choice.few.tile_m and shares(problem, problem.keys, sms):
        return Plan(tiles, 1, sms)
    steps = max(1, -(-problem.scores.most_keys(problem.keys, problem.queries) // tiles.tile_n))
    dims = (
        (problem.dim + problem.dim_v) * problem.dtype.itemsize // 2
    )  # of 8 bits memory and products are twice as fast
    ctas = min(range(1, _MOST_CTAS + 1), key=lambda n: cost(tiles, n, row_tiles, groups, steps, dims, sms))
    if ctas == 1 and tiles is choice.many and row_tiles % 2 == 0:
        return Plan(choice.pair, 2)
    return Plan(tiles, ctas)
