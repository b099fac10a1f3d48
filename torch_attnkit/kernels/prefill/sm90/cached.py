"""Host side of ``multi.py``: queries at the end of a cache on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ...scores import MOST
from ..launch import nothing_attended, query_reader, reader, scalars
from ..problem import Operands, Problem
from . import multi_plan, multi_workspace
from .multi_plan import Plan, Tiles

_KERNEL = "torch_attnkit.kernels.prefill.sm90.cached_kernel"


class Plans(Protocol):
    """``multi_plan``, or ``multi_codes_plan``."""

    def plan(self, problem: Problem, sms: int) -> Plan: ...
    def signature(self, problem: Problem, tiles: Tiles) -> dict[str, Any]: ...


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    return launcher_of(problem, target, _KERNEL, multi_plan)


def launcher_of(problem: Problem, target: Target, kernel: str, plans: Plans) -> Callable[[Operands], None]:
    """The same by the kernels of a module, ``kernel``."""
    p = problem
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    plan = plans.plan(p, driver.sm_count(p.device))
    trace = "trace_cached_persistent" if plan.persistent else "trace_cached"
    run = compile.launcher(target, p.device, kernel, trace=trace, **plans.signature(p, plan.tiles))
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    scales_of, numbers = scale_reader(p), scalars_of(p, plan.ctas)
    workspace = multi_workspace.of_splits(p, plan)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        sink, start = unread if o.sink is None else o.sink, o.kv_len if o.kv_start is None else o.kv_start
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), o.kv_len, sink, start, scales_of(o.scales))
        run(ins, (o.out, o.lse), numbers, *workspace())

    return launch


Scales = tuple[torch.Tensor | None, ...]  # of q, k and v, (B, Hkv) each


def scale_reader(problem: Problem) -> Callable[[Scales], Scales | None]:
    """What a kernel is given of a call's scales: of E4M3 ones where it has none, else nothing."""
    p = problem
    if p.dtype.itemsize > 1:
        return lambda scales: None
    ones = torch.ones(p.batch, p.kv_heads, dtype=torch.float32, device=p.device)
    return lambda scales: tuple(ones if scale is None else scale for scale in scales)


def scalars_of(problem: Problem, ctas: int) -> tuple[Any, ...]:
    """The Scalars of the kernels for blocks of queries, over caches and over pages."""
    window, sinks = problem.scores.bounds if problem.scores.window >= 0 else (MOST, 0)
    flags = (int(on) for on in (problem.causal, problem.sink, problem.kv_start))
    return (*scalars(problem.scores, 0, 0)[:2], window, sinks, *flags, ctas)
