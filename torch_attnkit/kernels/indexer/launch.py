"""Host side of the indexer's scores for NVIDIA GPUs. Imports no cutlass."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import astuple

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..fp4.launch import dequantizer
from ..fp4.problem import Dequantize, Dequantized
from ..prefill.launch import reader
from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.tokens * p.entries == 0:
        return lambda operands: None
    plan = importlib.import_module(f"torch_attnkit.kernels.indexer.{target.arch}.plan")
    dtype = plan.product_dtype(p.format, p.dtype)
    stored = "mxfp4" if p.format == "mxfp4" else short(p.dtype)
    scaled = (p.format == "fp8" and p.q_scale, p.format == "fp8")
    fixed = (stored, short(dtype), short(p.weights), p.heads, p.dim, plan.stages(p.heads, p.dim), p.ids, p.paged)

    sms = driver.sm_count(p.device)

    def compiled(load: int) -> Callable[..., None]:
        config = plan.Config(*fixed, *scaled, load)
        tokens = plan.tokens_of_block(p, config.keys, sms)
        run = compile.launcher(
            target, p.device, f"torch_attnkit.kernels.indexer.{target.arch}.kernel", config=astuple(config)
        )
        return lambda *arguments: run(*arguments, (tokens, sms))

    size = p.dtype.itemsize
    widest = next(w for w in (16, 8, 4, 2, 1) if w <= size or all(s * size % w == 0 for s in p.k_steps))
    wide, read = compiled(widest), _queries(p, dtype, target)
    narrow: list[Callable[..., None]] = []

    def launch(o: Operands) -> None:
        aligned = not o.k.data_ptr() & (widest - 1)
        if not aligned and not narrow:
            narrow.append(compiled(size))
        k = o.k if size > 1 else o.k.view(torch.uint8)
        scales = (o.q_scale if scaled[0] else None, o.k_scale)
        (wide if aligned else narrow[0])(read(o), k, o.weights, o.k_len, o.ids, o.table, *scales, o.scores)

    return launch


def _queries(p: Problem, dtype: torch.dtype, target: Target) -> Callable[[Operands], torch.Tensor]:
    """Brings q into the dtype of products, and into a layout that TMA reads."""
    if dtype == p.dtype:
        read = reader(p.q, dtype.itemsize)
        return lambda o: read(o.q)
    if p.format == "fp8":
        return lambda o: _signed(o.q.to(dtype, memory_format=torch.contiguous_format), o.q_scale)
    shape = (p.tokens, p.heads, p.dim)
    steps = (p.q.strides[:-1], p.q_scale_steps)
    decode = dequantizer(Dequantize("mxfp4", p.device, dtype, p.dim, shape[:-1], *steps, swizzled=False), target)

    def decoded(o: Operands) -> torch.Tensor:
        assert o.q_scale is not None
        q = torch.empty(shape, dtype=dtype, device=o.q.device)
        decode(Dequantized(o.q, o.q_scale, None, q))
        return q

    return decoded


def _signed(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """q with the signs of its scales: their sizes join the weights, which are multiplied after the rectification."""
    return q if scale is None else q.mul_(scale.sign())
