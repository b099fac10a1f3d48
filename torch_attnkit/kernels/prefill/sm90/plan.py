"""Host side of the Hopper prefill kernels: tiles per head size, and the kernel's signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_attnkit.core.spec import short

from ..problem import Problem


@dataclass(frozen=True)
class Tiles:
    """M queries by N keys, depth of the rings of K and V and of Q's, and two choices of ``prefill.py``.

    ``turns``: consumers issue their products in turn. ``late_rescale``: the output is rescaled while the scores of
    the next block are computed rather than before. ``pair``: two CTAs on two heads that share their keys load half of
    every block each, into the shared memory of both, so that the L2 is read half as often.
    """

    tile_m: int
    tile_n: int
    stages: int
    q_stages: int = 2
    turns: bool = True
    late_rescale: bool = False
    pair: bool = False

    def paired(self, group: int) -> bool:
        """Whether two CTAs work together; their two heads must share a KV head of ``group`` query heads."""
        return self.pair and group % 2 == 0


class Choice(NamedTuple):
    """Tiles where every query sees all keys, where causality hides some, and where a window does."""

    full: Tiles
    causal: Tiles
    window: Tiles


# Tuned on an H200 in bf16; docs/lab/prefill.md has the figures, also of what lost.
# 14 % over M 128, 5 % over N 112, 3 % over one Q buffer.
_D64 = Tiles(192, 128, 4)
# 1 % over pairs, up to 4 % over N 128 with P in shared memory, 3 to 8 % over M 128 in pairs.
_D96 = Tiles(192, 112, 3, 1)
# 2 % over CTAs alone, 1 % over turns, 1 to 3 % over N 160 and 176, 2 % over a second Q buffer.
_D128 = Tiles(128, 128, 2, 1, turns=False, pair=True)
# 4 % over rescaling early.
_D256 = Tiles(128, 80, 2, 1, late_rescale=True, pair=True)
DTYPES = "bf16 f16"
TILES = {
    # (D, Dv): D a multiple of 16, which a product takes at a time, Dv of 32, which the epilogue stores
    (32, 32): Choice(_D64, _D64, Tiles(128, 128, 4)),  # M 192 spills with a window and sink tokens
    # Window: 21 % over M 192, 2 % over N 64.
    (64, 64): Choice(_D64, _D64, Tiles(128, 128, 4)),
    (96, 96): Choice(_D96, _D96, Tiles(128, 128, 2, 1, pair=True)),
    # Window: 3 % over CTAs alone.
    (128, 128): Choice(_D128, _D128, Tiles(128, 128, 2, 2, pair=True)),
    (192, 128): Choice(_D128, _D128, _D128),
    (256, 256): Choice(_D256, _D256, _D256),
}


def tiles(problem: Problem) -> Tiles:
    choice = TILES[problem.dim, problem.dim_v]
    return choice.window if problem.scores.window >= 0 else choice.causal if problem.causal else choice.full


def signature(problem: Problem) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    chosen = tiles(problem)
    return {
        "dtype": short(problem.dtype),
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "tile_m": chosen.tile_m,
        "tile_n": chosen.tile_n,
        "stages": chosen.stages,
        "q_stages": chosen.q_stages,
        "turns": chosen.turns,
        "late_rescale": chosen.late_rescale,
        "pair": chosen.paired(problem.group),
        "causal": problem.causal,
        "sink": problem.sink,
        "normalize": problem.normalize,
        **problem.scores.features(),
    }


def sharers(problem: Problem, signature: dict[str, Any]) -> int:
    """How many work tiles of the same queries share a KV head."""
    return problem.group // (2 if signature["pair"] else 1)
