"""Host side of queries at the end of a cache on Blackwell.

The kernels are those of dense batches: the query heads of a KV head and the queries of a block are the rows of their
tiles, and a sequence's queries end where its keys do. Where tiles alone would leave multiprocessors idle,
``split_plan.py`` splits the keys of each, and a second launch, of the merge family, combines the splits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ...merge import launch as merge
from ..launch import nothing_attended, reading, scalars, section
from ..problem import Layout, Operands, Problem
from . import plan, split_plan

Run = Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], None]


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    if min(problem.batch, problem.queries, problem.heads) == 0:
        return lambda operands: None
    p = dataclasses.replace(problem, k=_by_token(problem.k), v=_by_token(problem.v))
    signature = plan.signature(p) | dict(kv_start=p.kv_start)
    sms = driver.sm_count(p.device)
    splits = split_plan.num_splits(p, signature, sms)
    if splits == 1:
        run: Run = compile.launcher(target, p.device, trace_cached, **signature)
    else:
        run = _split(p, target, signature, splits, sms)
    start = reading(run, p, scalars(p.scores, section(p, plan.sharers(p, signature)), sms))

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        start(o._replace(k=o.k.transpose(1, 2), v=o.v.transpose(1, 2)))  # (B, S, Hkv, D)

    return launch


def _by_token(cache: Layout) -> Layout:
    """The layout of a cache with its axes as (B, S, Hkv, D)."""
    return Layout(*((a[0], a[2], a[1], a[3]) for a in cache))


def _split(problem: Problem, target: Target, signature: dict[str, Any], splits: int, sms: int) -> Run:
    """What runs the kernel on splits of the keys and combines them, with the kernel's arguments.

    A pair of CTAs would halve their number, and sinks are for the second launch.
    """
    B, T, Hq, Dv = problem.batch, problem.queries, problem.heads, problem.dim_v
    alone = signature | dict(split=True, sink=False, pair=False)
    attend = compile.launcher(target, problem.device, trace_cached, **alone)
    partials = (splits, B * T, Hq, Dv)
    shares = merge.dense(torch.float32, problem.out_dtype, problem.device, partials, sink=problem.sink)
    combine = merge.kernel(shares, target, sms, merge.width(shares))
    rows = splits * B * T * Hq
    space = Workspace(problem.device, rows * (Dv + 1), 0)

    def run(ins: tuple[Any, ...], outs: tuple[Any, ...], launch_scalars: tuple[Any, ...]) -> None:
        floats, _ = space.get()
        out, lse = floats[: rows * Dv], floats[rows * Dv : rows * (Dv + 1)]
        q, k, v, sink, *lengths = ins
        attend(
            (q, k, v, None, *lengths),
            (out.view(splits * B, T, Hq, Dv), lse.view(splits * B, T, Hq), None),
            launch_scalars,
        )
        merged = (outs[0].view(B * T, Hq, Dv), outs[1].view(B * T, Hq))
        combine(out.view(splits, B * T, Hq, Dv), lse.view(splits, B * T, Hq), sink, None, *merged)

    return run


def trace_cached(arch: str, **signature: Any) -> compile.Traced:
    """Queries at the end of a cache.."""
    from . import kernel

    return kernel.trace_cached(arch, **signature)
