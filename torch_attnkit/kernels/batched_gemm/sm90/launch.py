"""Host side of products of groups of FP4 numbers on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ...prefill.launch import reader
from ...prefill.problem import Layout
from ..problem import Fp4Problem, Operands
from . import plan


def fp4(p: Fp4Problem, target: Target) -> Callable[[Operands], None]:
    """By few tokens' kernel or by ``wgmma``. Scales in the 128x4 layout are copied if they are not contiguous."""
    sms = driver.sm_count(p.device)
    few, many = plan.few(p, sms), plan.fp4(p, sms)
    swizzled, kind = p.scale_layout == "128x4", plan.scale_kind(p)
    common = dict(
        out_dtype=short(p.out_dtype), swizzled=swizzled, divisors=p.divisors, o_alignment=many.o_alignment,
    )  # fmt: skip

    def compiled(trace: compile.Trace, **special: Any) -> Callable[..., None]:
        return compile.launcher(target, p.device, trace, **common, **special)

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return memory.empty(shape, dtype=dtype, device=p.device)

    if few:
        trace = trace_fp4_few_codes if few.codes else trace_fp4_few
        run = compiled(trace, config=astuple(few), even=p.n % 4 == 0)
    else:
        run = compiled(
            trace_fp4_wgmma, format=p.format, widths=many.widths, group=many.group, warps=many.warps,
            code_alignment=many.code_alignment, scale_vector=many.scale_vector, even=p.n % 2 == 0,
        )  # fmt: skip
    # Whole multiples of 16 bytes come by TMA.
    by_tma = reader(Layout((p.groups, p.n, p.k // 2), (*p.weight, 1)), 1)
    read_weight = by_tma if many.code_alignment == 16 else functools.partial(_aligned_bytes, nbytes=many.code_alignment)

    def launch(operands: Operands) -> None:
        o = operands
        assert o.x_scale is not None and o.weight_scale is not None
        x_scale, weight_scale = (t.view(torch.uint8) for t in (o.x_scale, o.weight_scale))
        if swizzled:
            x_scale, weight_scale = x_scale.contiguous(), weight_scale.contiguous()
        else:
            x_scale = x_scale.transpose(0, 1)  # (G, T, K/block)
        x, weight = _aligned_bytes(o.x, many.o_alignment), read_weight(o.weight)
        factors = room(torch.float32, 2)
        given = (factors[:1] if t is None else t.view(1) for t in (o.x_global, o.weight_global))
        weights = weight, _aligned_bytes(weight_scale, many.scale_vector), factors.view(1, 2), factors, factors
        if few:
            run(x, x_scale, *given, weights, o.out)
        else:
            x_rows = room(torch.bfloat16, p.groups * p.tokens, many.x_columns)
            numbers = kind, many.columns, many.prepare_blocks, many.blocks
            run(x, x_scale, *given, weights, x_rows, factors, o.out, numbers)

    return launch


def _aligned_bytes(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """``t``, or a copy of it: rows that start at multiples of so many bytes."""
    if t.data_ptr() % nbytes or any(
        n > 1 and step % nbytes for n, step in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    ):
        return t.clone(memory_format=torch.contiguous_format)
    return t


def trace_fp4_wgmma(arch: str, **signature: Any) -> compile.Traced:
    """Many tokens."""
    from . import kernel

    return kernel.trace_fp4_wgmma(arch, **signature)


def trace_fp4_few(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens, decoded numbers."""
    from . import kernel

    return kernel.trace_fp4_few(arch, **signature)


def trace_fp4_few_codes(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens, codes as E4M3."""
    from . import kernel

    return kernel.trace_fp4_few_codes(arch, **signature)
