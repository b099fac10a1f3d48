"""Host side of the Blackwell prefill kernels: tiles per head size, and the kernel's signature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_attnkit.core import invariance
from torch_attnkit.core.spec import short

from ..problem import Layout, Problem

_ROWS = 128
# Keys that a box has at least: what 128 bytes of shared memory are swizzled by.
LEAST_BOX = 8
# What numbers of rows are counted in.
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Tiles:
    """Keys of a block, tiles of 128 rows in flight, depth of the rings of K and V, and when CTAs work in pairs.

    228 KB of shared memory hold the queries and the rings, 512 columns of tensor memory two buffers of scores and an
    output for each tile: Dv above 128 leaves room for one tile. ``pair`` is "full" where it pays as long as every query
    sees all keys: causal rows far apart would make the pair's earlier one visit blocks for nothing. "no window": the
    reads that a pair saves are worth these blocks, unless a window leaves few others. Stages are those of 2-byte
    elements; of bytes there are twice as many. Where two ``ctas`` have a tile together, stages hold pieces of blocks,
    which are as large whatever the dtype (``two_cta.py``), and so are the rings.
    """

    tile_n: int
    tiles: int
    stages: int
    pair: str = ""
    ctas: int = 1
    staged: int = 0  # of E4M3 that is widened, stages of K and of V as they come

    def stages_of(self, itemsize: int) -> int:
        return self.stages * 2 // itemsize if self.ctas == 1 else self.stages


DTYPES, CODES = "bf16 f16", "f8e4m3"
TILES = {
    # (D, Dv): multiples of 32, which a product of E4M3 takes at a time
    (32, 32): Tiles(128, 2, 4),
    (64, 64): Tiles(128, 2, 4),
    (96, 96): Tiles(128, 2, 3, "full"),
    (128, 128): Tiles(128, 2, 2, "full"),
    (192, 128): Tiles(128, 2, 1, "full"),
    (256, 256): Tiles(128, 1, 1, "always"),
    (512, 512): Tiles(128, 1, 4, "no window", 2),
}
# E4M3 pages beside queries of 16 bits, whose blocks are widened in shared memory. One CTA has a tile.
FP8_KV_TILES = {
    (32, 32): Tiles(128, 2, 4, staged=4),
    (64, 64): Tiles(128, 2, 2, staged=3),
    (96, 96): Tiles(128, 2, 2, staged=2),
    (128, 128): Tiles(128, 2, 1, staged=2),
    (192, 128): Tiles(128, 2, 1, staged=1),
    (256, 256): Tiles(64, 1, 1, staged=2),
}


def tiles_of(problem: Problem) -> Tiles:
    return (FP8_KV_TILES if problem.fp8_kv else TILES)[problem.dim, problem.dim_v]


def signature(problem: Problem) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    p, scores = problem, problem.scores
    chosen = tiles_of(p)
    group = p.group if p.group and _ROWS % p.group == 0 else 1
    invariant = invariance.is_on()  # then sizes of the batch decide on nothing
    rows = p.queries * group  # up to 128 are one tile
    everything = not p.causal and scores.window < 0
    pays = {"": False, "full": everything, "no window": scores.window < 0, "always": True}[chosen.pair]
    return {
        "dtype": short(p.dtype),
        "dim": p.dim,
        "dim_v": p.dim_v,
        "tile_n": chosen.tile_n,
        "tiles": chosen.tiles if rows > _ROWS or invariant else 1,
        "group": group,
        "stages": chosen.stages_of(p.dtype.itemsize),
        "pair": rows > _ROWS * chosen.tiles and pays and not invariant,
        "causal": p.causal,
        "sink": p.sink,
        "normalize": p.normalize,
        **scores.features(),
        **({"scales": p.scales} if any(p.scales) else {}),
        **({"fp8_kv": True, "staged": chosen.staged} if p.fp8_kv else {}),
    }


def sharers(problem: Problem, signature: dict[str, Any]) -> int:
    """How many work tiles of the same queries share a KV head."""
    return max(1, problem.group // signature["group"])


def multiprocessors(signature: dict[str, Any]) -> int:
    """How many have a tile together."""
    return TILES[signature["dim"], signature["dim_v"]].ctas


def box_of(page: int, tiles: Tiles) -> int:
    """Keys that TMA loads at once: boxes divide a page and a CTA's share of a block. 0: rows are gathered."""
    box = math.gcd(page, tiles.tile_n // tiles.ctas)
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
