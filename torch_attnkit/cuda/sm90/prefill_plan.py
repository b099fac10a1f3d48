"""Host side of the prefill kernels: tiles per head size, scalars, and layouts that TMA can read. Imports no cutlass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_attnkit.core import Call
from torch_attnkit.core.spec import short

MOST = 2**30  # windows and sink counts above every length mean "all"
_TINY = 1e-30  # a scale of 0 must not meet a masked score of -inf
# Bytes of keys and values that one section of heads may fill, of an H200's 50 MB of L2. Causal, D 128, 1 x 16384:
# 716 TFLOP/s with 16 MB, 699 with 32 MB, 708 with all heads in one section.
_L2 = 16 << 20


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
# 4 x 4096, 32/8 heads, causal: 589, 571 alone; 584 alone and without turns.
_D96 = Tiles(128, 128, 2, 1, pair=True)
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
    (96, 96): Choice(_D96, _D96, _D96),
    # Window 1024, 32/8 heads, 2 x 8192: 446 us, alone 459 us.
    (128, 128): Choice(_D128, _D128, Tiles(128, 128, 2, 2, pair=True)),
    (192, 128): Choice(_D128, _D128, _D128),
    (256, 256): Choice(_D256, _D256, _D256),
}


def tiles(dim: int, dim_v: int, causal: bool, window: int) -> Tiles:
    """The tiles of a call; ``window`` is -1 where there is none."""
    choice = TILES[dim, dim_v]
    return choice.window if window >= 0 else choice.causal if causal else choice.full


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that TMA accepts for the same elements: multiples of 8, where the size is 1 too. None: there are none."""
    found = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and (stride % 8 or stride == 0):
            return None
        found.append(8 if size == 1 else stride)
    return (*found, 1)


def reader(signature: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Brings a tensor with this one's shape and strides into a layout that TMA reads; copies it if no view will do."""
    strides = _strides(tuple(signature.shape), tuple(signature.stride()))
    same = strides == tuple(signature.stride())

    def read(t: torch.Tensor) -> torch.Tensor:
        if strides is None or t.data_ptr() % 16:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
        return t if same else t.as_strided(t.shape, strides)

    return read


@dataclass(frozen=True)
class Scores:
    """How scores become weights: scale, cap, window and sink tokens as in the op's arguments; ``dim`` is D."""

    dim: int
    scale: float | None
    softcap: float
    window: int
    sink_tokens: int

    @property
    def factor(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def negate(self) -> bool:
        """Whether the kernel needs -q: it takes maxima of scores that are not scaled yet."""
        return self.factor < 0 and self.softcap <= 0

    def features(self) -> dict[str, bool]:
        on = self.window >= 0
        return {"window": on, "sink_tokens": on and self.sink_tokens > 0, "softcap": self.softcap > 0}

    def scalars(self, section: int, sms: int) -> tuple[Any, ...]:
        """The kernel's Scalars."""
        capped = self.softcap > 0
        return (
            max((self.softcap if capped else abs(self.factor)) * math.log2(math.e), _TINY),
            self.factor / self.softcap if capped else 0.0,
            min(self.window, MOST),
            min(self.sink_tokens, MOST),
            section,
            sms,
        )


def section(keys: int, row_bytes: int, group: int) -> int:
    """Query heads whose keys and values, ``keys`` rows of ``row_bytes`` per KV head of ``group`` heads, fit in L2."""
    return min(max(1, _L2 // max(1, keys * row_bytes)) * group, MOST)


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


def nothing_attended(out: torch.Tensor, lse: torch.Tensor, row_sum: torch.Tensor) -> None:
    """The results of queries that have no keys."""
    out.zero_()
    lse.fill_(-torch.inf)
    row_sum.zero_()
