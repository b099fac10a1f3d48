"""Host side of dense and packed batches whose work tiles persistent CTAs draw: which, and their tiles. Imports no
cutlass."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_attnkit.core.spec import short

from ..launch import section
from ..problem import Problem
from .multi_plan import Tiles
from .paged_plan import fills


class Choice(NamedTuple):
    """Tiles where every query sees all keys, where causality hides some, and where a window does, of few keys or of
    many; None: those of ``plan.py``, which no CTA draws. ``capped`` are those of capped scores, if the others would
    spill."""

    full: Tiles | None
    causal: Tiles | None
    window: Tiles | None
    wide: Tiles | None
    capped: Tiles | None = None


# Tuned on an H200 in bf16, us for those of plan.py (docs/lab/prefill.md): causal 4x4096 575 for 615, all keys 1075
# for 1117, a window of 128 151 for 241, of which N 80 makes two blocks of 8 query heads' 24 queries (N 128: 198).
# Of one of 1024 N 80 takes 580 and N 128 573.
_D64 = Choice(*(Tiles(192, 128, 4),) * 2, Tiles(192, 80, 6), Tiles(192, 128, 4), capped=Tiles(192, 112, 4))
# 758 for 813, 1388 for 1474; N 96 767 and 1421, of a window of 1024 378 for N 112's 366, but of 128 100 for 109.
_D96 = Tiles(192, 112, 3)
# Causal 8x2048 512 for 523, 1x16384 3531 for 3573, 2x8192 1844 for 1829; packed 64x1..4096 5202 for 5486, all keys 9900
# for 10154. A window of 1024 is even.
_D128 = Tiles(128, 128, 2, turns=False)
DRAWN = {
    (32, 32): _D64,
    (64, 64): _D64,
    (96, 96): Choice(_D96, _D96, Tiles(192, 96, 3), _D96, capped=Tiles(192, 96, 3)),
    (128, 128): Choice(_D128, _D128, None, None),
}
# Dense batches whose queries see all keys, of which pairs of CTAs read keys once for two: at the limit of power 1x16384
# takes 6893 to 6910 us so and 6933 to 7016 drawn, 2x8192 3490 and 3540 (H200).
_PAIRED = ((128, 128),)
_WIDE = 512  # keys of a window; 128 and 1024 were timed
_LEAST_GROUP = 2  # query heads of a KV head: tiles of one head are those of ``plan.py``


class Plan(NamedTuple):
    tiles: Tiles
    ctas: int
    section: int  # KV heads of dense batches whose keys share the L2


def plan(problem: Problem, sms: int, drawn: dict[tuple[int, int], Choice] = DRAWN) -> Plan | None:
    """How CTAs draw the work tiles of ``problem``; None where they do not: a launch of few, or of what the kernel does
    not do."""
    p = problem
    choice = drawn.get((p.dim, p.dim_v))
    if choice is None or not p.normalize or any(p.scales) or p.group < _LEAST_GROUP:
        return None
    windowed = p.scores.window >= 0
    tiles = choice.causal if p.causal else choice.full
    if windowed:
        tiles = choice.window if p.scores.window < _WIDE else choice.wide
    if (p.dim, p.dim_v) in _PAIRED and not (p.packed or p.causal or windowed):
        return None
    if p.scores.capped and tiles is not None:
        tiles = choice.capped or tiles
    if tiles is None or not fills(tiles, p.group):
        return None
    sequences = max(1, p.batch)
    tokens = min(p.longest, -(-p.queries // sequences)) if p.packed else p.queries
    span = tiles.tile_m // p.group * p.group
    if -(-tokens * p.group // span) * sequences * p.kv_heads <= sms:
        return None
    together = section(p, 1)
    if p.causal:
        together = max(together, p.kv_heads)  # the heaviest tiles of a sequence first, whatever its keys take
    return Plan(tiles, sms * tiles.per_sm, min(together, sequences * p.kv_heads))


def signature(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """Of the kernel; all else is known at the launch."""
    p = problem
    lengths = {} if p.packed else dict(kv_len=p.kv_len, kv_start=p.kv_start)
    sizes = dict(dtype=short(p.dtype), dim=p.dim, dim_v=p.dim_v, group=p.group)
    return sizes | tiles._asdict() | p.scores.features() | lengths
