"""Host side of the decode kernels for NVIDIA GPUs: plan, kernels, workspace, launch. Imports no cutlass."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ..scores import LOG2_E
from .plan import Plan
from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.batch == 0:
        return lambda operands: None
    scores, scaled = problem.scores, any(problem.scales)
    plan = importlib.import_module(f"torch_attnkit.kernels.decode.{target.arch}.plan").plan

    def compiled(same: bool) -> tuple[Plan, Callable[..., None]]:
        p: Plan = plan(problem, driver.sm_count(problem.device), same=same)
        signature = p.sizes | (dict(scales=problem.scales) if scaled else {})
        kernel = f"torch_attnkit.kernels.decode.{target.arch}.kernel"
        run = compile.launcher(target, problem.device, kernel, trace=p.trace, dtype=short(problem.dtype), **signature)
        return p, run

    # A tensor that is both caches is read once; which it is can change from call to call. Not of a cache without rows,
    # whose every load by TMA is an illegal instruction.
    two = compiled(False)
    one = compiled(True) if "same" in two[0].sizes and problem.rows_of_cache > 0 else two
    floats, counters = (max(getattr(p, name) for p, _ in (one, two)) for name in ("floats", "counters"))
    workspace = Workspace(problem.device, floats, counters)
    # Into powers of two, before the cap or behind it.
    factors = (scores.slope, scores.softcap * LOG2_E) if scores.capped else (scores.factor * LOG2_E, 0.0)
    numbers = (*factors, *scores.bounds, int(problem.sink), int(problem.kv_start))
    no_pages = problem.page > 0 and problem.pages == 0

    def launch(operands: Operands) -> None:
        parts, count = workspace.get()
        q, k, v = operands.q, operands.k, operands.v
        if problem.codes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
            q = q.view(torch.uint8) if q.element_size() == 1 else q
        if (k.data_ptr() | v.data_ptr()) & 15 or q.data_ptr() & 3:
            q, k, v = _aligned(q, k, v)
        p, run = one if one is not two and k.data_ptr() == v.data_ptr() and k.stride() == v.stride() else two
        table = operands.table
        if no_pages and table is not None:
            table = table[:, :0]  # so that no length, however wrong, makes a kernel look for keys
        tensors = (
            q, k, v, table, operands.kv_len, parts if operands.sink is None else operands.sink,
            operands.kv_len if operands.kv_start is None else operands.kv_start, operands.out, operands.lse, parts,
            count, operands.scales if scaled else None,
        )  # fmt: skip
        cut = (p.head_blocks, int(p.whole), p.abreast, p.least_tiles, p.combine_blocks)
        run(tensors, (*numbers, *cut), p.blocks)

    return launch


def _aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of those that start where the kernels do not read; the plan knows strides, but not where memory begins.

    Caches are read 16 bytes at a time, q 4. One tensor that is both caches remains one.
    """
    kept = torch.contiguous_format
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    k = k.clone(memory_format=kept) if k.data_ptr() & 15 else k
    v = k if same else v.clone(memory_format=kept) if v.data_ptr() & 15 else v
    return (q.clone(memory_format=kept) if q.data_ptr() & 3 else q), k, v
