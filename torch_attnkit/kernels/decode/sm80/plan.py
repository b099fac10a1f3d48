"""How a decode launch is cut where a CTA has 99 KB of shared memory: RTX 30, 40 and 50, DGX Spark; an A100 as well."""

from __future__ import annotations

from dataclasses import replace

from torch_attnkit.cuda import driver
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.cuda.smem import RESERVED

from ..config import MmaConfig
from ..plan import SHORT, Plan, cut, is_whole, one_tile
from ..problem import Problem

DTYPES = "bf16 f16"
# (D, Dv): multiples of 16, Dv up to 512. A group of more than 8 query heads, 16 up to 128 columns, is cut.
HEADS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
_WARPS = (4, 3, 2, 1)
_IN_FLIGHT = 6  # tiles of a warp
_MOST_CTAS = 2  # of an SM


def plan(problem: Problem, sms: int, *, arch: str, same: bool = False) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same`` or not.

    A CTA has four warps if two tiles of each fit, which is 70 KB of 128 columns in flight: an SM of an RTX 5090 reads 8
    in 800 ns, one of an A100 15 (by their data sheets). Where an SM has memory for two such, it has two.
    """
    limits = LIMITS[arch]
    keys_of_cache = problem.scores.most_keys(problem.capacity)
    config = replace(one_tile(problem), capacity=limits.shared)
    least = replace(config, stages=2)
    if config.keys == 32 and not _fits(replace(least, warps=_WARPS[0])):
        config, least = replace(config, keys=16), replace(least, keys=16)
    warps = next(w for w in _WARPS if _fits(replace(least, warps=w)))
    whole = is_whole(keys_of_cache)
    stages = (
        2
        if keys_of_cache <= SHORT
        else next(n for n in range(_IN_FLIGHT, 1, -1) if _fits(replace(config, warps=warps, stages=n)))
    )
    made = replace(config, warps=warps, stages=stages)
    of_sm = driver.shared_of_sm(problem.device, limits.shared)
    per_sm = made.blocks_per_sm if whole else max(1, min(_MOST_CTAS, of_sm // (made.shared_bytes + RESERVED)))
    found = cut(problem, made, keys_of_cache, sms * per_sm, sms)
    return replace(found, sizes=found.sizes | dict(capacity=made.capacity))


def _fits(config: MmaConfig) -> bool:
    return config.shared_bytes <= config.capacity
