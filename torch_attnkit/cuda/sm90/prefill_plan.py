"""Host side of the Hopper prefill kernels: tiles per head size, and the kernel's signature. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_attnkit.core import Call
from torch_attnkit.core.spec import short

from ..prefill_launch import Scores


@dataclass(frozen=True)
class Tiles:
    """M queries by N keys, depth of the rings of K and V and of Q's, and two choices of ``cuda/sm90/prefill.py``.

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


# TFLOP/s on an H200, bf16. Runs of milliseconds meet its power limit, so figures move by 2 % from run to run.
# 4 x 4096, 32/8 heads, full: 549; M 128 480, N 112 521, one Q buffer 535.
_D64 = Tiles(192, 128, 4)
# 4 x 4096, 32/8 heads, in one run: causal 513, full 561; in pairs 509, 558; N 128 with P in shared memory, where the
# registers of three consumers do not hold it, 491, 554, and with a second buffer for Q 501, 561; N 144 so, 505, 560;
# M 128, N 128 in pairs 499, 521.
_D96 = Tiles(192, 112, 3, 1)
# 32/8 heads: 4 x 4096 causal 690, alone 677; 2 x 8192 full 727, with turns 719, alone 715. N 160 and 176 lost 1 to 3 %,
# a second buffer for Q, whose addresses then change from tile to tile, 2 %.
_D128 = Tiles(128, 128, 2, 1, turns=False, pair=True)
# 16/2 heads, 2 x 8192: 796 full and causal; rescaling early 762.
_D256 = Tiles(128, 80, 2, 1, late_rescale=True, pair=True)
TILES = {
    # (D, Dv)
    (32, 32): Choice(_D64, _D64, Tiles(128, 128, 4)),  # M 192 spills with a window and sink tokens
    # Window 128, 64/8 heads, 2 x 8192: 239 us, with M 192 290 us, with N 64 243 us.
    (64, 64): Choice(_D64, _D64, Tiles(128, 128, 4)),
    (96, 96): Choice(_D96, _D96, Tiles(128, 128, 2, 1, pair=True)),
    # Window 1024, 32/8 heads, 2 x 8192: 446 us, alone 459 us.
    (128, 128): Choice(_D128, _D128, Tiles(128, 128, 2, 2, pair=True)),
    (192, 128): Choice(_D128, _D128, _D128),
    (256, 256): Choice(_D256, _D256, _D256),
}


def tiles(dim: int, dim_v: int, causal: bool, window: int) -> Tiles:
    """The tiles of a call; ``window`` is -1 where there is none."""
    choice = TILES[dim, dim_v]
    return choice.window if window >= 0 else choice.causal if causal else choice.full


def signature(call: Call, chosen: Tiles, scores: Scores) -> dict[str, Any]:
    """The part of a kernel's signature that does not depend on how sequences are stored."""
    arg, dim = call.arg, call.dim
    return {
        "dtype": short(call.dtype),
        "dim": dim["D"],
        "dim_v": dim["Dv"],
        "tile_m": chosen.tile_m,
        "tile_n": chosen.tile_n,
        "stages": chosen.stages,
        "q_stages": chosen.q_stages,
        "turns": chosen.turns,
        "late_rescale": chosen.late_rescale,
        "pair": chosen.paired(dim["Hq"] // dim["Hkv"]),
        "causal": arg.causal,
        "sink": arg.sink is not None,
        "normalize": arg.normalize,
        **scores.features(),
    }
