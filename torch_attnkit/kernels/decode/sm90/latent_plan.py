"""How a launch over latents is cut on Hopper."""

from __future__ import annotations

from torch_attnkit.cuda.sm90.warpgroup import ROWS
from torch_attnkit.cuda.workspace import SplitLayout

from ..plan import SHORT, Plan, paged
from ..problem import Problem
from ..traces import trace_latent
from .config import COUNTERS

# Keys of a tile, and tiles in memory. Beside Q and P there is room for 128 keys: two tiles of 64, whose scores in two
# sums are 64 of a thread's 88 registers, or two of 48, of which one is loaded when it is wanted, or these. Of tiles of
# keys and of values apart there is room for two of each.
_KEYS, _STAGES, _STAGES_APART = 32, 4, 2
_LEAST = 128  # keys of a split at least, for it has 64 rows to write and to combine


def plan(problem: Problem, sms: int, *, same: bool) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: values are the first columns of the keys.

    ``latent.py`` has one block on an SM, with up to 64 heads.
    """
    most_keys = problem.scores.most_keys(problem.capacity)
    group, dim_v, whole = problem.group, problem.dim_v, most_keys <= SHORT
    head_blocks, least = -(-group // ROWS), 1 if whole else _LEAST // _KEYS
    # All head blocks of a KV head go along its keys at the same time, if that idles no more than a 16th of the blocks.
    abreast = head_blocks if sms // head_blocks * head_blocks * 16 >= sms * 15 else 1
    stages = _STAGES if same else _STAGES_APART
    return Plan(
        trace_latent,
        paged(problem) | dict(dim=problem.dim, dim_v=dim_v, keys=_KEYS, stages=stages, same=same),
        head_blocks,
        abreast,
        whole,
        least,
        sms,
        0,
        2 * sms * SplitLayout(ROWS, dim_v).floats,
        COUNTERS * sms,
    )
