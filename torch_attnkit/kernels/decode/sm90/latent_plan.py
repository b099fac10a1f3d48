"""How a launch over latents is cut on Hopper, and by which kernel. Imports no cutlass."""

from __future__ import annotations

from ..config import SplitLayout
from ..plan import SHORT, Plan, combines, mma, paged, splits_of
from ..problem import Problem
from .config import HEADS as ROWS
from .config import THREADS

# Keys of a tile, and tiles in memory. Beside Q and P there is room for 128 keys: two tiles of 64, whose scores in two
# sums are 64 of a thread's 88 registers, or two of 48, of which one is loaded when it is wanted, or these.
_KEYS, _STAGES = 32, 4
_LEAST = 128  # keys of a split at least, for it has 64 rows to write and to combine


def plan(problem: Problem, sms: int, *, same: bool) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: values are the first columns of the keys."""
    keys = problem.scores.most_keys(problem.capacity)
    return _rows_of_heads(problem, keys, sms) if same else mma(problem, keys, sms)


def _rows_of_heads(problem: Problem, most_keys: int, sms: int) -> Plan:
    """For ``latent.py``: one block an SM, with up to 64 heads."""
    group, dim_v, whole = problem.group, problem.dim_v, most_keys <= SHORT
    head_blocks, least = -(-group // ROWS), 1 if whole else _LEAST // _KEYS
    # All head blocks of a KV head go along its keys at the same time, if that idles no more than a 16th of the blocks.
    abreast = head_blocks if sms // head_blocks * head_blocks * 16 >= sms * 15 else 1
    work = problem.batch * problem.kv_heads * head_blocks
    splits = 1 if whole else splits_of(sms // abreast, work // abreast, -(-most_keys // _KEYS), least)
    combine = combines(min(group, ROWS), dim_v, 4 * THREADS, splits)
    return Plan(
        "trace_latent",
        paged(problem) | dict(dim=problem.dim, dim_v=dim_v, keys=_KEYS, stages=_STAGES, combine=combine),
        head_blocks,
        abreast,
        whole,
        least,
        sms,
        min(work * min(group, ROWS), sms) if combine else 0,
        2 * sms * SplitLayout(ROWS, dim_v).floats,
        sms,
    )
