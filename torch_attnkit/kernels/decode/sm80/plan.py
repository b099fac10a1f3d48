"""How a decode launch is cut where an SM has 99 KB of shared memory: RTX 30, 40 and 50, DGX Spark; an A100 as well."""

from __future__ import annotations

from dataclasses import replace

from torch_attnkit.cuda.limits import LIMITS

from ..config import MmaConfig
from ..plan import SHORT, Plan, cut, one_tile
from ..problem import Problem

DTYPES = "bf16 f16"
# (D, Dv): multiples of 16 up to 512. A group of more than 8 query heads, 16 up to 128 columns, is cut.
HEADS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
_WARPS = (4, 3, 2, 1)
_IN_FLIGHT = 6  # tiles of a warp


def plan(problem: Problem, sms: int, *, arch: str, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors, one CTA on each where groups are long; ``same`` or not.

    With two tiles of each warp in flight an SM waits for more than memory's latency takes: 70 KB of 128 columns, of
    which 8 are read in 800 ns on an RTX 5090, and 15 on an A100 (by their data sheets).
    """
    limits = LIMITS[arch]
    keys_of_cache = problem.scores.most_keys(problem.capacity)
    config = replace(one_tile(problem), capacity=limits.shared)
    least = replace(config, stages=2)
    if config.keys == 32 and not _fits(replace(least, warps=_WARPS[0])):
        config, least = replace(config, keys=16), replace(least, keys=16)
    warps = next(w for w in _WARPS if _fits(replace(least, warps=w)))
    whole = keys_of_cache <= SHORT
    stages = 2 if whole else next(n for n in range(_IN_FLIGHT, 1, -1) if _fits(replace(config, warps=warps, stages=n)))
    made = replace(config, warps=warps, stages=stages)
    per_sm = made.blocks_per_sm if whole else 1
    found = cut(problem, made, keys_of_cache, sms * per_sm, sms)
    return replace(found, sizes=found.sizes | dict(capacity=made.capacity))


def _fits(config: MmaConfig) -> bool:
    return config.shared_bytes <= config.capacity
