"""Host side of the batched GEMM for NVIDIA GPUs: which kernel, what is copied for it, the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from ..grouped_gemm.problem import BLOCK
from ..prefill.launch import reader
from ..prefill.problem import Layout
from .plan import CHUNK, configure, configure_fp4
from .problem import Fp4Problem, Operands, Problem
from .sm90 import plan as hopper
from .sm100 import plan as blackwell


def launcher(problem: Problem | Fp4Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``. Operands whose rows do not start at multiples of 16 bytes are copied."""
    p = problem
    if p.tokens * p.groups * p.n == 0:
        return lambda operands: None
    if p.k == 0:
        return _zero_out
    sms = driver.sm_count(p.device)
    if isinstance(p, Fp4Problem):
        return (_fp4_hopper if target.arch == "sm90" else _fp4)(p, target, sms)
    tile = hopper.tile(p, sms) if target.arch == "sm90" else None
    return _mma(p, target) if tile is None else _wgmma(p, target, tile, sms)


def _zero_out(operands: Operands) -> None:
    """The sums of no products."""
    operands.out.zero_()


def _wgmma(p: Problem, target: Target, tile: hopper.Tile, sms: int) -> Callable[[Operands], None]:
    run = compile.launcher(
        target, p.device, trace_wgmma,
        dtypes=(short(p.dtype), short(p.out_dtype)), config=astuple(tile),
    )  # fmt: skip
    layouts = ((p.tokens, p.groups, p.k), p.x), ((p.groups, p.n, p.k), p.weight)
    x, weight = (reader(Layout(s, (*steps, 1)), p.dtype.itemsize) for s, steps in layouts)
    return lambda o: run(x(o.x), weight(o.weight), o.out, sms)


def _mma(p: Problem, target: Target) -> Callable[[Operands], None]:
    run = compile.launcher(
        target, p.device, trace,
        dtypes=(short(p.dtype), short(p.out_dtype)), even=p.n % 2 == 0, 
        config=astuple(configure(p.tokens, LIMITS[target.arch].shared)),
    )  # fmt: skip
    x_fits, weight_fits = (all(n % CHUNK == 0 for n in (p.k, *steps)) for steps in (p.x, p.weight))

    def padded(t: torch.Tensor, fits: bool) -> torch.Tensor:
        """``t``, or a copy with zeros behind each row: rows of whole chunks, at multiples of one. Zeros add nothing."""
        if fits and t.data_ptr() % 16 == 0:
            return t
        lacking = -t.shape[-1] % (16 // t.itemsize)
        return torch.nn.functional.pad(t, (0, lacking)).clone(memory_format=torch.contiguous_format)

    return lambda o: run(padded(o.x, x_fits), padded(o.weight, weight_fits), o.out)


def _fp4_hopper(p: Fp4Problem, target: Target, sms: int) -> Callable[[Operands], None]:
    """By few tokens' kernels or by ``wgmma``. Scales in the 128x4 layout are copied if they are not contiguous."""
    few, many = hopper.few(p, sms), hopper.fp4(p, sms)
    swizzled, kind = p.scale_layout == "128x4", hopper.scale_kind(p)
    common = dict(
        out_dtype=short(p.out_dtype), swizzled=swizzled, divisors=p.divisors, o_alignment=many.o_alignment,
    )  # fmt: skip

    def compiled(trace: compile.Trace, **special: Any) -> Callable[..., None]:
        return compile.launcher(target, p.device, trace, **common, **special)

    if few:
        run = compiled(trace_fp4_e4m3 if few.e4m3 else trace_fp4_mma, config=astuple(few), even=p.n % 4 == 0)
    else:
        run = compiled(
            trace_fp4_wgmma, format=p.format, widths=many.widths, group=many.group, warps=many.warps,
            code_alignment=many.code_alignment, scale_vector=many.scale_vector, even=p.n % 2 == 0,
        )  # fmt: skip
    # Whole multiples of 16 bytes are loaded by TMA.
    by_tma = reader(Layout((p.groups, p.n, p.k // 2), (*p.weight, 1)), 1)
    read_weight = by_tma if many.code_alignment == 16 else functools.partial(_aligned, nbytes=many.code_alignment)

    def launch(operands: Operands) -> None:
        o = operands
        assert o.x_scale is not None and o.weight_scale is not None
        x_scale, weight_scale = (t.view(torch.uint8) for t in (o.x_scale, o.weight_scale))
        if swizzled:
            x_scale, weight_scale = x_scale.contiguous(), weight_scale.contiguous()
        else:
            x_scale = x_scale.transpose(0, 1)  # (G, T, K/block)
        x, weight = _aligned(o.x, many.o_alignment), read_weight(o.weight)
        factors = memory.empty((2,), dtype=torch.float32, device=p.device)
        given = (factors[:1] if t is None else t.view(1) for t in (o.x_global, o.weight_global))
        weights = weight, _aligned(weight_scale, many.scale_vector), factors.view(1, 2), factors, factors
        if few:
            run(x, x_scale, *given, weights, o.out)
        else:
            x_rows = memory.empty((p.groups * p.tokens, many.x_columns), dtype=torch.bfloat16, device=p.device)
            scalars = kind, many.columns, many.prepare_blocks, many.blocks
            run(x, x_scale, *given, weights, x_rows, factors, o.out, scalars)

    return launch


def _aligned(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """``t``, or a copy of it: rows that start at multiples of so many bytes."""
    return t if _is_aligned(t, nbytes) else t.clone(memory_format=torch.contiguous_format)


def _is_aligned(t: torch.Tensor, nbytes: int) -> bool:
    steps = (step for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1)
    return t.data_ptr() % nbytes == 0 and all(step % nbytes == 0 for step in steps)


def _fp4(p: Fp4Problem, target: Target, sms: int) -> Callable[[Operands], None]:
    """On other targets. Packed rows must start and end at multiples of 16 bytes, linear scales at words: what does not
    is copied."""
    swizzled = p.scale_layout == "128x4"
    common = dict(out_dtype=short(p.out_dtype), swizzled=swizzled, divisors=p.divisors)
    counts: tuple[int, ...] = ()
    if target.arch == "sm100":
        tile = blackwell.fp4(p, swizzled and p.k // BLOCK[p.format] % 4 == 0, sms)
        even, counts = math.gcd(p.n, 16 // p.out_dtype.itemsize), (sms,)
        run = compile.launcher(target, p.device, trace_fp4_tcgen05, **common, config=astuple(tile), even=even)
    else:
        config = astuple(configure_fp4(p, target.arch))
        run = compile.launcher(target, p.device, trace_fp4, **common, config=config, even=p.n % 2 == 0)

    def padded(t: torch.Tensor, nbytes: int) -> torch.Tensor:
        """As ``_aligned``, but the rows of a copy end at such multiples, too."""
        if _is_aligned(t, nbytes):
            return t
        return torch.nn.functional.pad(t, (0, -t.shape[-1] % nbytes)).contiguous()[..., : t.shape[-1]]

    def scales(t: torch.Tensor) -> torch.Tensor:
        t = t.view(torch.uint8)
        if not swizzled:
            return padded(t, 4)
        t = t.contiguous()
        return t.clone() if t.data_ptr() % 16 else t

    def launch(operands: Operands) -> None:
        o = operands
        assert o.x_scale is not None and o.weight_scale is not None
        x_scale = scales(o.x_scale if swizzled else o.x_scale.transpose(0, 1))
        one = memory.empty((1,), dtype=torch.float32, device=p.device)
        given = (one if t is None else t.view(1) for t in (o.x_global, o.weight_global))
        tokens = padded(o.x.transpose(0, 1), 16), x_scale
        run(tokens, (padded(o.weight, 16), scales(o.weight_scale)), *given, o.out, *counts)

    return launch


def trace(arch: str, **signature: Any) -> compile.Traced:
    """16 bits, rows that TMA does not take."""
    from . import kernel

    return kernel.trace(arch, **signature)


def trace_wgmma(arch: str, **signature: Any) -> compile.Traced:
    """16 bits on Hopper."""
    from .sm90 import kernel_wgmma

    return kernel_wgmma.trace(arch, **signature)


def trace_fp4_wgmma(arch: str, **signature: Any) -> compile.Traced:
    """FP4 on Hopper, many tokens."""
    from .sm90 import kernel_fp4_wgmma

    return kernel_fp4_wgmma.trace(arch, **signature)


def trace_fp4_mma(arch: str, **signature: Any) -> compile.Traced:
    """FP4 on Hopper, few tokens, dequantised."""
    from .sm90 import kernel_fp4_mma

    return kernel_fp4_mma.trace(arch, **signature)


def trace_fp4_e4m3(arch: str, **signature: Any) -> compile.Traced:
    """FP4 on Hopper, up to 4 tokens, re-encoded as E4M3."""
    from .sm90 import kernel_fp4_e4m3

    return kernel_fp4_e4m3.trace(arch, **signature)


def trace_fp4(arch: str, **signature: Any) -> compile.Traced:
    """FP4 on targets with 99 KB of shared memory."""
    from . import fp4_kernel

    return fp4_kernel.trace(arch, **signature)


def trace_fp4_tcgen05(arch: str, **signature: Any) -> compile.Traced:
    """FP4 on Blackwell."""
    from .sm100 import kernel_block_scaled

    return kernel_block_scaled.trace(arch, **signature)
