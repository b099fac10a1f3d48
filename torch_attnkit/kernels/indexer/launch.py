"""Host side of the indexer's scores for NVIDIA GPUs. Imports no cutlass."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import astuple

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..prefill.launch import reader
from ..prefill.problem import Layout
from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.tokens * p.entries == 0:
        return lambda operands: None
    plan = importlib.import_module(f"torch_attnkit.kernels.indexer.{target.arch}.plan")
    dtype = plan.product_dtype(p.dtype)
    base = (short(p.dtype), short(dtype), short(p.weights), p.heads, p.dim, plan.stages(p.heads, p.dim))

    def compiled(load: int) -> Callable[..., None]:
        config = plan.Config(*base, p.ids, p.paged, p.q_scale, p.k_scale, load)
        tokens = plan.tokens_of_block(p, config.keys, driver.sm_count(p.device))
        run = compile.launcher(
            target, p.device, f"torch_attnkit.kernels.indexer.{target.arch}.kernel", config=astuple(config)
        )
        return lambda *arguments: run(*arguments, tokens)

    widest = _width(p.k_steps, p.dtype.itemsize)
    wide = compiled(widest)
    narrow: list[Callable[..., None]] = []
    same = dtype == p.dtype
    read = reader(p.q if same else Layout.of(torch.empty(p.q.shape, device="meta")), dtype.itemsize)

    def launch(o: Operands) -> None:
        aligned = not o.k.data_ptr() & (widest - 1)
        if not aligned and not narrow:
            narrow.append(compiled(p.dtype.itemsize))
        q = read(o.q if same else o.q.to(dtype).contiguous())
        k = o.k if p.dtype.itemsize > 1 else o.k.view(torch.uint8)
        (wide if aligned else narrow[0])(q, k, *o[2:])

    return launch


def _width(steps: tuple[int, ...], itemsize: int) -> int:
    """Bytes of the widest loads that start at multiples of themselves for these strides."""
    return next(w for w in (16, 8, 4, 2, 1) if w <= itemsize or all(s * itemsize % w == 0 for s in steps))
