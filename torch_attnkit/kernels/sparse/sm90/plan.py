"""Which head sizes the kernel of Hopper has, and how its launch is cut. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_attnkit.kernels.decode.sm90.config import HEADS
from torch_attnkit.kernels.prefill.sm90.multi_plan import at_once

from ..problem import Problem

DTYPES = "bf16 f16"
# D, a multiple of 128: keys of a tile, a multiple of 16 up to 64, and tiles in memory.
TILES = {128: (64, 6), 256: (64, 4), 512: (48, 3)}
ALIGNED = 16  # keys, of which a CTA's share is a multiple: what a product takes at once
MOST_CTAS = 8  # of a cluster; every GPU takes so many
# Microseconds, roughly: of a launch, of a work tile beside its keys, alone on a multiprocessor and by a cluster, of a
# merge, and of a key of 512 columns.
_START, _TURN, _CLUSTER_TURN, _MERGE, _KEY = 4.0, 1.0, 3.0, 1.5, 1 / 45


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled with, and how its launch is cut.

    A *work tile* is a token with up to 64 of its heads, of which it has ``head_blocks``. ``ctas`` share its keys.
    """

    sizes: dict[str, Any]
    head_blocks: int
    ctas: int
    clusters: int


def share(keys: int, ctas: int) -> int:
    """Keys of each of a cluster's CTAs, as ``schedule.keys_of`` cuts them."""
    return -(-keys // (ctas * ALIGNED)) * ALIGNED


def cost(problem: Problem, work: int, ctas: int, sms: int) -> float:
    """Microseconds, roughly, of ``work`` work tiles by clusters of so many CTAs."""
    rounds = -(-work // max(1, at_once(ctas, sms, 1)))
    turn = _TURN if ctas == 1 else _CLUSTER_TURN
    keys = share(problem.keys, ctas) * _KEY * problem.dim / 512
    return _START + rounds * (turn + keys) + (_MERGE if ctas > 1 else 0.0)


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    keys, stages = TILES[problem.dim]
    head_blocks = -(-problem.heads // HEADS)
    work = problem.tokens * head_blocks
    ctas = min(range(1, MOST_CTAS + 1), key=lambda n: cost(problem, work, n, sms))
    sizes = dict(dim=problem.dim, keys=keys, stages=stages, merge=ctas > 1, prefetch=ctas == 1)
    return Plan(sizes, head_blocks, ctas, work if ctas > 1 else min(work, sms))
