"""Host side of the products of groups for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..prefill.launch import reader
from ..prefill.problem import Layout
from .plan import CHUNK, configure
from .problem import Fp4Problem, Operands, Problem
from .sm90 import launch as hopper
from .sm90 import plan as hopper_plan
from .sm100 import launch as blackwell
from .sm100 import plan as blackwell_plan


def launcher(problem: Problem | Fp4Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``. Operands whose rows do not start at multiples of 16 bytes are copied."""
    p = problem
    if p.tokens * p.groups * p.n == 0:
        return lambda operands: None
    if p.k == 0:
        return _nothing
    if isinstance(p, Fp4Problem):
        return (hopper.fp4 if target.arch == "sm90" else blackwell.fp4)(p, target)
    return _plain(p, target)


def _plain(p: Problem, target: Target) -> Callable[[Operands], None]:
    sms = driver.sm_count(p.device)
    tile = (hopper_plan.tile if target.arch == "sm90" else blackwell_plan.tile)(p, sms)
    if tile is None:
        return _by_mma_sync(p, target)
    run = compile.launcher(
        target, p.device, trace_wgmma,
        dtypes=(short(p.dtype), short(p.out_dtype)), config=astuple(tile),
    )  # fmt: skip
    layouts = ((p.tokens, p.groups, p.k), p.x), ((p.groups, p.n, p.k), p.weight)
    x, weight = (reader(Layout(s, (*steps, 1)), p.dtype.itemsize) for s, steps in layouts)
    return lambda o: run(x(o.x), weight(o.weight), o.out, sms)


def _by_mma_sync(p: Problem, target: Target) -> Callable[[Operands], None]:
    c = configure(p.tokens)
    run = compile.launcher(
        target,
        p.device,
        trace,
        dtypes=(short(p.dtype), short(p.out_dtype)),
        even=p.n % 2 == 0,
        config=(c.tokens, c.n, c.warps, c.stages),
    )
    x_fits, weight_fits = (all(n % CHUNK == 0 for n in (p.k, *steps)) for steps in (p.x, p.weight))

    def launch(operands: Operands) -> None:
        o = operands
        run(_aligned(o.x, x_fits), _aligned(o.weight, weight_fits), o.out)

    return launch


def _nothing(operands: Operands) -> None:
    """The sums of no products."""
    operands.out.zero_()


def _aligned(t: torch.Tensor, fits: bool) -> torch.Tensor:
    """``t``, or a copy with zeros behind each row: rows of whole chunks, at multiples of one. Zeros add nothing."""
    if fits and t.data_ptr() % 16 == 0:
        return t
    lacking = -t.shape[-1] % (16 // t.itemsize)
    return torch.nn.functional.pad(t, (0, lacking)).clone(memory_format=torch.contiguous_format)


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)


def trace_wgmma(arch: str, **signature: Any) -> compile.Traced:
    """``sm90/kernel.py``."""
    from .sm90 import kernel as hopper_kernel

    return hopper_kernel.trace_wgmma(arch, **signature)
