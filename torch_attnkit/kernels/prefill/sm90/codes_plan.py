"""Host side of ``codes.py``: tiles for E4M3 on Hopper. Imports no cutlass."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_attnkit.core.spec import short

from ..problem import Problem
from .plan import Choice, Tiles

CODES = "f8e4m3"
_D128 = Tiles(128, 128, 2, 1, pair=True)
_D256 = Tiles(128, 128, 2, 1, late_rescale=True, pair=True)
_D64 = Tiles(128, 128, 4)
TILES = {
    # (D, Dv): multiples of 32, which a product takes at a time; keys of a block are so, too
    (32, 32): Choice(_D64, _D64, _D64),
    (64, 64): Choice(_D64, _D64, _D64),
    (96, 96): Choice(_D128, _D128, _D128),
    (128, 128): Choice(_D128, _D128, _D128),
    (192, 128): Choice(_D128, _D128, _D128),
    (256, 256): Choice(_D256, _D256, _D256),
}


def tiles(problem: Problem) -> Tiles:
    choice = TILES[problem.dim, problem.dim_v]
    return choice.window if problem.scores.window >= 0 else choice.causal if problem.causal else choice.full


def signature(problem: Problem) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    p, chosen = problem, tiles(problem)
    return {
        "dtype": short(p.dtype),
        "dim": p.dim,
        "dim_v": p.dim_v,
        **dataclasses.asdict(chosen),
        "pair": chosen.paired(p.group),
        "promote": p.dim_v <= 128,
        "causal": p.causal,
        "sink": p.sink,
        "normalize": p.normalize,
        **({"scales": p.scales} if any(p.scales) else {}),
        **p.scores.features(),
    }


def transpose_signature(signature: dict[str, Any]) -> dict[str, Any]:
    """The part of it that V's transposition needs."""
    return {name: signature[name] for name in ("dtype", "dim", "dim_v", "tile_n", "window", "sink_tokens")}
