"""Which head sizes the kernel of Hopper has, and how its launch is cut. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_attnkit.kernels.decode.sm90.config import HEADS

from ..problem import Problem

DTYPES = "bf16 f16"
# D, a multiple of 128: keys of a tile, a multiple of 16 up to 64, and tiles in memory.
TILES = {128: (64, 6), 256: (64, 4), 512: (48, 3)}
MOST_CTAS = 8  # of a cluster; every GPU takes so many


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled with, and how its launch is cut.

    A *work tile* is a token with up to 64 of its heads, of which it has ``head_blocks``. ``ctas`` share its keys.
    """

    sizes: dict[str, Any]
    head_blocks: int
    ctas: int
    clusters: int


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    keys, stages = TILES[problem.dim]
    head_blocks = -(-problem.heads // HEADS)
    work = problem.tokens * head_blocks
    ctas = 1
    # More CTAs a work tile while all run at the same time and each has two tiles of keys.
    while ctas < MOST_CTAS and 2 * ctas * work <= sms and problem.keys > ctas * keys * 2:
        ctas *= 2
    sizes = dict(dim=problem.dim, keys=keys, stages=stages, merge=ctas > 1)
    return Plan(sizes, head_blocks, ctas, work if ctas > 1 else min(work, sms))
