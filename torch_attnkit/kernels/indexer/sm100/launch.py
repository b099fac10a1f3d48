"""Host side of the Blackwell indexer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ...prefill.launch import reader
from ..problem import Operands, Problem
from . import plan

_LOADS = (16, 4)  # bytes that ``cp.async`` brings; rows that start anywhere are loaded number by number


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    stored, fp8 = "mxfp4" if p.format == "mxfp4" else short(p.dtype), p.format == "fp8"
    scaled = fp8 and p.q_scale, fp8
    size = p.dtype.itemsize
    sms = driver.sm_count(p.device)
    tokens = plan.tokens_of_block(p, sms)

    def compiled(load: int) -> Callable[..., None]:
        cut = plan.shape(p, stored)
        config = plan.Config(stored, short(p.weights), p.heads, p.dim, *cut, p.ids, p.paged, *scaled, load)
        return compile.launcher(target, p.device, trace, config=astuple(config))

    widest = next((w for w in _LOADS if all(step * size % w == 0 for step in p.k_steps)), size)
    wide, read = compiled(widest), reader(p.q, size)
    narrow: list[Callable[..., None]] = []

    def launch(o: Operands) -> None:
        aligned = o.k.data_ptr() % widest == 0
        if not aligned and not narrow:
            narrow.append(compiled(size))
        run = wide if aligned else narrow[0]
        q_scale = o.q_scale if scaled[0] or stored == "mxfp4" else None
        run(read(o.q), _bytes(o.k), o.weights, o.k_len, o.ids, o.table, q_scale, o.k_scale, o.scores, tokens)

    return launch


def _bytes(k: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, which every torch can pass on."""
    return k if k.dtype.itemsize > 1 else k.view(torch.uint8)


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
