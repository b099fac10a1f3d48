"""Host side of ``multi.py``: queries at the end of a cache on Hopper. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ...scores import MOST
from ..launch import nothing_attended, query_reader, reader, scalars
from ..problem import Operands, Problem
from . import multi_plan
from .meeting import meeting


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    p, scores = problem, problem.scores
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    plan = multi_plan.plan(p, driver.sm_count(p.device))
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.cached_kernel",
        trace="trace_cached_persistent" if plan.persistent else "trace_cached",
        dtype=short(p.dtype), dim=p.dim, dim_v=p.dim_v, softcap=scores.capped, **plan.tiles._asdict(),
    )  # fmt: skip
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    numbers = scalars_of(p, plan.ctas)
    joins = meeting(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        sink, start = unread if o.sink is None else o.sink, o.kv_len if o.kv_start is None else o.kv_start
        run((read_q(o.q), read_k(o.k), read_v(o.v), o.kv_len, sink, start), (o.out, o.lse), numbers, *joins())

    return launch


def scalars_of(problem: Problem, ctas: int) -> tuple[Any, ...]:
    """The Scalars of the kernels for blocks of queries, over caches and over pages."""
    window, sinks = problem.scores.bounds if problem.scores.window >= 0 else (MOST, 0)
    flags = (int(on) for on in (problem.causal, problem.sink, problem.kv_start))
    return (*scalars(problem.scores, 0, 0)[:2], window, sinks, *flags, ctas)
