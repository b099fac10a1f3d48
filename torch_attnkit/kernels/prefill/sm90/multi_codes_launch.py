"""Host side of ``multi_codes.py``: blocks of queries over a cache of E4M3 on Hopper. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import nothing_attended, query_reader, reader
from ..problem import Operands, Problem
from . import multi_codes_plan
from .cached import scalars_of
from .meeting import meeting


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    p = problem
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    plan = multi_codes_plan.plan(p, driver.sm_count(p.device))
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.multi_codes_kernel",
        trace="trace_cached_persistent" if plan.persistent else "trace_cached",
        **multi_codes_plan.signature(p, plan.tiles),
    )  # fmt: skip
    read_q, read_k, read_v = query_reader(p), reader(p.k, 1), reader(p.v, 1)
    numbers = scalars_of(p, plan.ctas)
    joins = meeting(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)
    ones = torch.ones(p.batch, p.kv_heads, dtype=torch.float32, device=p.device)

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        sink, start = unread if o.sink is None else o.sink, o.kv_len if o.kv_start is None else o.kv_start
        scales = tuple(ones if scale is None else scale for scale in o.scales)
        run((read_q(o.q), read_k(o.k), read_v(o.v), o.kv_len, sink, start, scales), (o.out, o.lse), numbers, *joins())

    return launch
