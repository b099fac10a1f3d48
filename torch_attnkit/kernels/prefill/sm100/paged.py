"""Host side of blocks of queries over pages on Blackwell.

The kernel is that of packed sequences; its loading warp finds keys by the block table (``paged_load.py``): in boxes
where pages hold some, or row by row. CTAs work alone: pairs would load halves of boxes. E4M3 beside queries of 16 bits
comes in boxes and is widened (``widen.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import query_reader, reader, scalars
from ..problem import Layout, PagedOperands, PagedProblem
from . import plan


def launcher(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What solves ``problem``, whose pages may have any size."""
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    # One tile in flight where no sequence has rows for two.
    chosen = plan.signature(dataclasses.replace(p, queries=min(p.queries, p.longest)))
    box = plan.box_of(problem.page, plan.tiles_of(p))
    run = compile.launcher(
        target, p.device, trace_paged,
        **chosen | dict(pair=False, page=problem.page, box=box),
    )  # fmt: skip
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.kv_itemsize) for t in (p.k, p.v))
    scaled = any(p.scales)
    launch_scalars = scalars(p.scores, 1, driver.sm_count(p.device))
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: PagedOperands) -> None:
        if nothing:
            o.out.zero_()
            o.lse.fill_(-math.inf)
            return
        k, v = read_k(o.k), read_v(o.v)
        rows = None if box else (_rows(k), _rows(v))
        ins = (read_q(o.q), k, v, o.sink, o.cu_q, (o.kv_len, o.table, rows), o.scales if scaled else None)
        run(ins, (o.out, o.lse, None), launch_scalars)

    return launch


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """Pages (Np, Ps, Hkv, D) as the rows that TMA gathers: a view."""
    found = plan.rows_of(Layout.of(cache))
    if found is None:  # without the gaps there are fewer
        cache = torch.empty(cache.shape, dtype=cache.dtype, device=cache.device).copy_(cache)
        found = plan.rows_of(Layout.of(cache))
    assert found is not None
    rows, step = found
    return cache.as_strided((rows, cache.shape[-1]), (step, 1))


def trace_paged(arch: str, **signature: Any) -> compile.Traced:
    """``paged_kernel.py``."""
    from . import paged_kernel

    return paged_kernel.trace_paged(arch, **signature)
