"""Host side of products of groups of FP4 numbers on Blackwell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..problem import Fp4Problem, Operands
from . import plan

BLOCK = {"nvfp4": 16, "mxfp4": 32}


def fp4(p: Fp4Problem, target: Target) -> Callable[[Operands], None]:
    """Codes must start and end where TMA takes them, linear scales at words: what does not is copied."""
    sms = driver.sm_count(p.device)
    swizzled = p.scale_layout == "128x4"
    tile = plan.fp4(p, swizzled and p.k // BLOCK[p.format] % 4 == 0, sms)
    run = compile.launcher(
        target, p.device, trace_fp4,
        out_dtype=short(p.out_dtype), swizzled=swizzled, divisors=p.divisors, config=astuple(tile),
        even=math.gcd(p.n, 16 // p.out_dtype.itemsize),
    )  # fmt: skip

    def scales(t: torch.Tensor) -> torch.Tensor:
        t = t.view(torch.uint8)
        if not swizzled:
            return _aligned(t, 4)
        t = t.contiguous()
        return t.clone() if t.data_ptr() % 16 else t

    def launch(operands: Operands) -> None:
        o = operands
        assert o.x_scale is not None and o.weight_scale is not None
        x_scale = scales(o.x_scale if swizzled else o.x_scale.transpose(0, 1))
        one = memory.empty((1,), dtype=torch.float32, device=p.device)
        given = (one if t is None else t.view(1) for t in (o.x_global, o.weight_global))
        tokens = _aligned(o.x.transpose(0, 1), 16), x_scale
        run(tokens, (_aligned(o.weight, 16), scales(o.weight_scale)), *given, o.out, sms)

    return launch


def _aligned(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """``t`` (.., bytes), or a copy of it whose rows start at multiples of so many bytes."""
    steps = (step for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1)
    if t.data_ptr() % nbytes == 0 and all(step % nbytes == 0 for step in steps):
        return t
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % nbytes)).contiguous()[..., : t.shape[-1]]


def trace_fp4(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace_fp4(arch, **signature)
