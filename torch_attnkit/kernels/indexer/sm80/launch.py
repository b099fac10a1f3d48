"""Host side of the indexer by ``mma.sync``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from ..problem import Operands, Problem
from ..sm90 import launch as hopper
from ..sm90.plan import tokens_of_block
from . import plan


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    dtype, fp8 = plan.product_dtype(p, LIMITS[target.arch].e4m3), p.format == "fp8"
    stored = "mxfp4" if p.format == "mxfp4" else short(p.dtype)
    scaled = fp8 and p.q_scale, fp8
    types = stored, short(dtype), short(p.weights)
    fixed = (*types, p.heads, p.dim, *plan.cut(p, dtype.itemsize), p.ids, p.paged, *scaled)

    def compiled(load: int) -> Callable[..., None]:
        config = plan.Config(*fixed, load)
        tokens = tokens_of_block(p, config.keys, driver.sm_count(p.device))
        run = compile.launcher(target, p.device, trace_mma, config=astuple(config))
        return lambda *arguments: run(*arguments, tokens)

    size = p.dtype.itemsize
    widest = next(w for w in (16, 8, 4, 2, 1) if w <= size or all(s * size % w == 0 for s in p.k_steps))
    wide, read = compiled(widest), _queries(p, dtype, target)
    narrow: list[Callable[..., None]] = []

    def launch(o: Operands) -> None:
        aligned = o.k.data_ptr() % widest == 0
        if not aligned and not narrow:
            narrow.append(compiled(size))
        run = wide if aligned else narrow[0]
        keys = o.k if size > 1 else o.k.view(torch.uint8)  # not every torch hands E4M3 over
        run(read(o), keys, o.weights, o.k_len, o.ids, o.table, o.q_scale if scaled[0] else None, o.k_scale, o.scores)

    return launch


def _queries(p: Problem, dtype: torch.dtype, target: Target) -> Callable[[Operands], torch.Tensor]:
    """Brings q into the dtype of the products, with rows of 16 bytes' multiples; E4M3 as bytes."""
    if p.format != "fp8" or dtype == p.dtype:
        return hopper.queries(p, target)
    return lambda o: torch.empty(o.q.shape, dtype=dtype, device=o.q.device).copy_(o.q)


def trace_mma(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
