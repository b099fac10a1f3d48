"""Host side of ``paged_multi.py``: blocks of queries over pages on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import query_reader, reader
from ..paged import Operands, Problem
from . import multi_workspace, paged_plan
from .cached import scalars_of, scale_reader
from .paged_plan import Plan

_KERNEL = "torch_attnkit.kernels.prefill.sm90.paged_kernel"


class Plans(Protocol):
    """``paged_plan``, or ``paged_codes_plan``."""

    def plan(self, problem: Problem, sms: int) -> Plan: ...
    def signature(self, problem: Problem, plan: Plan) -> dict[str, Any]: ...


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    return launcher_of(problem, target, _KERNEL, paged_plan)


def launcher_of(problem: Problem, target: Target, kernel: str, plans: Plans) -> Callable[[Operands], None]:
    """The same by the kernels of a module, ``kernel``."""
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    plan = plans.plan(problem, driver.sm_count(p.device))
    trace = f"trace_paged{'_persistent' if plan.persistent else '_dynamic' if plan.dynamic else ''}"
    run = compile.launcher(target, p.device, kernel, trace=trace, **plans.signature(problem, plan))
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    scales_of, numbers = scale_reader(p), scalars_of(p, plan.ctas)
    workspace = multi_workspace.of_draws(p, plan.dynamic) if plan.dynamic else multi_workspace.of_splits(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: Operands) -> None:
        if nothing:
            o.out.zero_()
            o.lse.fill_(-torch.inf)
            return
        sink = unread if o.sink is None else o.sink
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), scales_of(o.scales), o.cu_q, o.table, o.kv_len, sink)
        run(ins, (o.out, o.lse), numbers, *workspace())

    return launch
