"""Host side of ``paged_multi.py``: blocks of queries over pages on Hopper. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import query_reader, reader
from ..paged import Operands, Problem
from . import paged_plan
from .cached import scalars_of
from .meeting import drawing, meeting


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    p, scores = problem.attention, problem.attention.scores
    if p.queries * p.heads == 0:
        return lambda operands: None
    plan = paged_plan.plan(problem, driver.sm_count(p.device))
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.paged_kernel",
        trace=f"trace_paged{'_persistent' if plan.persistent else '_dynamic' if plan.dynamic else ''}",
        dtype=short(p.dtype), dim=p.dim, dim_v=p.dim_v, softcap=scores.capped, page=problem.page, box=plan.box,
        group=p.group if plan.dynamic else 0, **plan.tiles._asdict(),
    )  # fmt: skip
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    numbers = scalars_of(p, plan.ctas)
    joins = drawing(p, plan.dynamic) if plan.dynamic else meeting(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: Operands) -> None:
        if nothing:
            o.out.zero_()
            o.lse.fill_(-torch.inf)
            return
        sink = unread if o.sink is None else o.sink
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), o.cu_q, o.table, o.kv_len, sink)
        run(ins, (o.out, o.lse), numbers, *joins())

    return launch
