"""Host side of the Blackwell prefill kernels: tiles per head size, and the kernel's signature. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_attnkit.core import Call
from torch_attnkit.core.spec import short

from ..prefill_launch import Scores, given

_ROWS = 128


@dataclass(frozen=True)
class Tiles:
    """Keys of a block, tiles of 128 rows in flight, depth of the rings of K and V, and when CTAs work in pairs.

    228 KB of shared memory hold the queries and the rings, 512 columns of tensor memory two buffers of scores and an
    output for each tile: Dv above 128 leaves room for one tile. ``pair`` is "full" where it pays as long as every query
    sees all keys: causal rows far apart would make the pair's earlier one visit blocks for nothing. "no window": the
    reads that a pair saves are worth these blocks, unless a window leaves few others. Stages are those of 2-byte
    elements; of bytes there are twice as many. Where two ``ctas`` have a tile together, stages hold pieces of blocks,
    which are as large whatever the dtype (``prefill_wide.py``), and so are the rings.
    """

    tile_n: int
    tiles: int
    stages: int
    pair: str = ""
    ctas: int = 1

    def stages_of(self, itemsize: int) -> int:
        return self.stages * 2 // itemsize if self.ctas == 1 else self.stages


TILES = {
    # (D, Dv)
    (32, 32): Tiles(128, 2, 4),
    (64, 64): Tiles(128, 2, 4),
    (96, 96): Tiles(128, 2, 3, "full"),
    (128, 128): Tiles(128, 2, 2, "full"),
    (192, 128): Tiles(128, 2, 1, "full"),
    (256, 256): Tiles(128, 1, 1, "always"),
    (512, 512): Tiles(128, 1, 4, "no window", 2),
}


def signature(call: Call, tokens: int, scores: Scores) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored.

    ``tokens`` is how many queries a sequence may have: up to 128 rows are one tile.
    """
    arg, dim = call.arg, call.dim
    chosen = TILES[dim["D"], dim["Dv"]]
    group = dim["Hq"] // max(1, dim["Hkv"])
    group = group if group and _ROWS % group == 0 else 1
    rows = tokens * group
    everything = not arg.causal and scores.window < 0
    pays = {"": False, "full": everything, "no window": scores.window < 0, "always": True}[chosen.pair]
    return {
        "dtype": short(call.dtype),
        "dim": dim["D"],
        "dim_v": dim["Dv"],
        "tile_n": chosen.tile_n,
        "tiles": chosen.tiles if rows > _ROWS else 1,
        "group": group,
        "stages": chosen.stages_of(call.dtype.itemsize),
        "pair": rows > _ROWS * chosen.tiles and pays,
        "causal": arg.causal,
        "sink": arg.sink is not None,
        "normalize": getattr(arg, "normalize", True),
        **scores.features(),
        **({"scales": given(arg)} if any(given(arg)) else {}),
    }


def multiprocessors(signature: dict[str, Any]) -> int:
    """How many have a tile together."""
    return TILES[signature["dim"], signature["dim_v"]].ctas
