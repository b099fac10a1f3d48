"""Host side of ``paged_multi_codes.py``: blocks of queries over pages of E4M3 on Hopper. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import query_reader, reader
from ..paged import Operands, Problem
from . import multi_codes_plan, paged_plan
from .cached import scalars_of
from .meeting import meeting


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    plan = paged_plan.plan(problem, driver.sm_count(p.device), multi_codes_plan.TILES, drawn={})
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.paged_codes_kernel",
        trace="trace_paged_persistent" if plan.persistent else "trace_paged",
        **multi_codes_plan.signature(p, plan.tiles), page=problem.page, box=plan.box,
    )  # fmt: skip
    read_q, read_k, read_v = query_reader(p), reader(p.k, 1), reader(p.v, 1)
    numbers = scalars_of(p, plan.ctas)
    joins = meeting(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)
    ones = torch.ones(p.batch, p.kv_heads, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: Operands) -> None:
        if nothing:
            o.out.zero_()
            o.lse.fill_(-torch.inf)
            return
        sink = unread if o.sink is None else o.sink
        scales = tuple(ones if scale is None else scale for scale in o.scales)
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), scales, o.cu_q, o.table, o.kv_len, sink)
        run(ins, (o.out, o.lse), numbers, *joins())

    return launch
