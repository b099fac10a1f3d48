"""Host side of ``codes.py``: tiles for E4M3 on Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_attnkit.core.spec import short

from ..problem import Problem
from .plan import Choice, Tiles

CODES = "f8e4m3"
_PROMOTED = 128  # columns up to which a thread has registers for the output and a block's share of it
# On an H100 80GB; docs/lab/prefill.md has the times. 7 % over M 128 and over N 96.
_D64 = Tiles(192, 128, 4)
# 2 % over pairs, 9 % over no turns (causal), 5 to 7 % over N 96.
_D128 = Tiles(128, 128, 4)
# 4 % over turns, 7 % over CTAs alone, 9 to 12 % over N 96.
_D256 = Tiles(128, 128, 2, 1, turns=False, pair=True)
# With a window and sink tokens the mask needs more registers than 128 keys leave, and so does a soft cap.
_WINDOW = Tiles(128, 96, 4)
TILES = {
    # (D, Dv): multiples of 32, which a product takes at a time; keys of a block are so, too
    (32, 32): Choice(_D64, _D64, Tiles(128, 128, 4)),
    (64, 64): Choice(_D64, _D64, Tiles(128, 128, 4)),
    (96, 96): Choice(_D128, _D128, _WINDOW),
    (128, 128): Choice(_D128, _D128, _WINDOW),
    (192, 128): Choice(_D128, _D128, _WINDOW),
    (256, 256): Choice(_D256, _D256, Tiles(128, 96, 3, 1, turns=False, pair=True)),
}


def tiles(problem: Problem) -> Tiles:
    choice, scores = TILES[problem.dim, problem.dim_v], problem.scores
    if scores.window >= 0 or scores.capped:
        return choice.window
    chosen = choice.causal if problem.causal else choice.full
    # Three consumers have 160 registers each: a scale of their own is one too many.
    return dataclasses.replace(chosen, tile_n=96) if chosen.tile_m == 192 and any(problem.scales) else chosen


def signature(problem: Problem) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    p, chosen = problem, tiles(problem)
    return {
        "dtype": short(p.dtype),
        "dim": p.dim,
        "dim_v": p.dim_v,
        **dataclasses.asdict(chosen),
        "pair": chosen.paired(p.group),
        "promote": p.dim_v <= _PROMOTED,
        "causal": p.causal,
        "sink": p.sink,
        "normalize": p.normalize,
        **({"scales": p.scales} if any(p.scales) else {}),
        **p.scores.features(),
    }


def transpose_signature(signature: dict[str, Any]) -> dict[str, Any]:
    """The part of it that V's transposition needs."""
    return {name: signature[name] for name in ("dtype", "dim", "dim_v", "tile_n", "window", "sink_tokens")}
