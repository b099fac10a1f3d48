"""Host side of prefill by ``mma.sync``: dense batches, packed sequences, queries at the end of a cache, and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from .. import launch as family
from ..problem import Operands, PagedOperands, PagedProblem, Problem
from ..sm90.launch import group_scalars, group_start
from ..sm90.tiles import SINGLE_TILE
from .tiles import MMA_TILES, MMA_TILES_FP8, MMA_TILES_FP8_KV, mma_tile


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, of dense batches or packed sequences."""
    p = family.without_idle_window(problem)
    if p.queries * p.heads * (1 if p.packed else p.batch) == 0:
        return lambda operands: None
    known = {"kv": "packed"} if p.packed else {"kv": "dense", "kv_len": p.kv_len, "kv_start": p.kv_start}
    features = p.scores.features() | {"group": p.group, "normalize": p.normalize, "sink": True, **_scales(p, p.scales)}
    run = compile.launcher(target, p.device, trace, **_sizes(p, p.longest or p.queries), **known, **features)
    start = family.reading(run, p, group_scalars(p, 1 if p.packed else family.section(p, 1)))
    unread = torch.empty(p.heads, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys) == 0

    def launch(o: Operands) -> None:
        if nothing:
            return family.nothing_attended(o)
        start(o if o.sink is not None else o._replace(sink=unread))

    return launch


def of_cache(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D)."""
    p = problem
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    run = compile.launcher(target, p.device, trace, kv="cache", **_sizes(p, p.queries), **_any_features(p))
    start = group_start(run, p, group_scalars(p, 1))

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return family.nothing_attended(o)
        kv_start = o.kv_len if o.kv_start is None else o.kv_start
        start(o, lambda q, k, v, sink, scales: (q, k, v, o.kv_len, sink, kv_start, scales))

    return launch


def of_pages(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What solves ``problem``, whose K and V are pages."""
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    run = compile.launcher(
        target, p.device, trace, kv="paged", page=problem.page, **_sizes(p, p.longest or p.queries), **_any_features(p)
    )  # fmt: skip
    start = group_start(run, p, group_scalars(p, 1))
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: PagedOperands) -> None:
        if nothing:
            return family.nothing_attended(o)
        start(o, lambda q, k, v, sink, scales: (q, k, v, scales, o.cu_q, o.table, o.kv_len, sink))

    return launch


def _sizes(problem: Problem, queries: int) -> dict[str, Any]:
    """``queries``: of a sequence at most."""
    p = problem
    table = MMA_TILES_FP8 if p.dtype.itemsize == 1 else MMA_TILES_FP8_KV if p.fp8_kv else MMA_TILES
    tile = mma_tile(table, p.dim, p.dim_v, queries * p.group)
    known = {"fp8_kv": True} if p.fp8_kv else {}
    return {"dtype": short(p.dtype), "dim": p.dim, "dim_v": p.dim_v, **tile.sizes(), "scheduler": SINGLE_TILE} | known


def _any_features(problem: Problem) -> dict[str, bool]:
    """Those that a call's scalars decide, and a soft cap, which is compiled in."""
    known = dict.fromkeys(("window", "sink_tokens", "kv_start", "ends_at_kv_len"), True)
    return known | {"softcap": problem.scores.capped, **_scales(problem, (True,) * 3)}


def _scales(problem: Problem, given: tuple[bool, ...]) -> dict[str, tuple[bool, ...]]:
    """Which of those of E4M3 a kernel is ``given``."""
    return {"scales": given} if problem.kv_itemsize == 1 and any(given) else {}


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
