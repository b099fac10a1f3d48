"""Host side of the decode kernels for NVIDIA GPUs: plan, kernels, workspace, launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ..scores import LOG2_E
from .plan import Plan
from .problem import Operands, Problem
from .sm80 import plan as ampere
from .sm90 import plan as hopper
from .sm100 import plan as blackwell

_PLANS: dict[str, Callable[..., Plan]] = {"sm90": hopper.plan, "sm100": blackwell.plan}
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.batch == 0:
        return lambda operands: None
    if problem.rows_of_cache == 0:
        return _nothing_attended
    scores, scaled = problem.scores, any(problem.scales)
    plan = _PLANS.get(target.arch, partial(ampere.plan, arch=target.arch))

    def compiled(same: bool) -> tuple[Plan, Callable[..., None]]:
        p: Plan = plan(problem, driver.sm_count(problem.device), same=same)
        signature = p.sizes | (dict(scales=problem.scales) if scaled else {})
        run = compile.launcher(target, problem.device, p.trace, dtype=short(problem.dtype), **signature)
        return p, run

    # A cache that has keys and values is read once; which it is can change from call to call.
    two = compiled(False)
    one = compiled(True) if "same" in two[0].sizes else two
    floats, counters = (max(getattr(p, name) for p, _ in (one, two)) for name in ("floats", "counters"))
    workspace = Workspace(problem.device, floats, counters)
    # Into powers of two, before the cap or behind it.
    factors = (scores.slope, scores.softcap * LOG2_E) if scores.capped else (scores.factor * LOG2_E, 0.0)
    fixed = (*factors, *scores.bounds, int(problem.sink), int(problem.kv_start))

    def launch(operands: Operands) -> None:
        parts, count = workspace.get()
        (q, k, v), same = _aligned(operands)
        p, run = one if same else two
        tensors = (
            q, k, v, operands.table, operands.kv_len, parts if operands.sink is None else operands.sink,
            operands.kv_len if operands.kv_start is None else operands.kv_start, operands.out, operands.lse, parts,
            count, operands.scales if scaled else None,
        )  # fmt: skip
        cut = (p.head_blocks, int(p.whole), p.concurrent, p.least_tiles, p.combine_blocks)
        run(tensors, (*fixed, *cut), p.blocks)

    return launch


def _nothing_attended(operands: Operands) -> None:
    """Of a cache without rows, whatever lengths and tables say: every load of one by TMA is an illegal instruction."""
    operands.out.zero_()
    operands.lse.fill_(-torch.inf)


def _aligned(operands: Operands) -> tuple[_Tensors, bool]:
    """q, k and v, E4M3 as bytes, and whether v is k, or its first columns.

    The plan knows strides, but not where memory begins: caches are read 16 bytes at a time, q 4, and what starts
    elsewhere is copied. One tensor that is both caches remains one.
    """
    q, k, v = (t.view(torch.uint8) if t.element_size() == 1 else t for t in operands[:3])
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    if (k.data_ptr() | v.data_ptr()) & 15 or q.data_ptr() & 3:
        kept = torch.contiguous_format
        if k.data_ptr() & 15:
            k = k.clone(memory_format=kept)
            v = k[..., : v.shape[-1]] if same else v
        v = v.clone(memory_format=kept) if v.data_ptr() & 15 else v
        q = q.clone(memory_format=kept) if q.data_ptr() & 3 else q
    return (q, k, v), same
