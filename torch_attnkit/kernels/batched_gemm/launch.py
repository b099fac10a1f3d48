"""Host side of the products of groups for NVIDIA GPUs. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from .plan import BLOCK, CHUNK, FP4_STAGE, configure, fp4_columns
from .problem import Fp4Problem, Operands, Problem


def launcher(problem: Problem | Fp4Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``. Operands whose rows do not start at multiples of 16 bytes are copied."""
    p = problem
    if p.tokens * p.groups * p.n == 0:
        return lambda operands: None
    if p.k == 0:
        return _nothing
    return _fp4(p, target) if isinstance(p, Fp4Problem) else _plain(p, target)


def _plain(p: Problem, target: Target) -> Callable[[Operands], None]:
    c = configure(p.tokens)
    run = compile.launcher(
        target,
        p.device,
        "torch_attnkit.kernels.batched_gemm.kernel",
        dtypes=(short(p.dtype), short(p.out_dtype)),
        even=p.n % 2 == 0,
        config=(c.tokens, c.n, c.warps, c.stages),
    )
    x_fits, weight_fits = (all(n % CHUNK == 0 for n in (p.k, *steps)) for steps in (p.x, p.weight))

    def launch(operands: Operands) -> None:
        o = operands
        run(_aligned(o.x, x_fits), _aligned(o.weight, weight_fits), o.out)

    return launch


def _fp4(p: Fp4Problem, target: Target) -> Callable[[Operands], None]:
    swizzled = p.scale_layout == "128x4"
    columns = -(-p.k // FP4_STAGE) * FP4_STAGE
    run = compile.launcher(
        target,
        p.device,
        "torch_attnkit.kernels.batched_gemm.fp4_kernel",
        format=p.format,
        out_dtype=short(p.out_dtype),
        swizzled=swizzled,
        divisors=p.divisors,
        columns=fp4_columns(p.tokens),
    )

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return memory.empty(shape, dtype=dtype, device=p.device)

    def launch(operands: Operands) -> None:
        o = operands
        assert o.x_scale is not None and o.weight_scale is not None
        scales = [t.view(torch.uint8) for t in (o.x_scale, o.weight_scale)]
        if swizzled:
            scales = [t.contiguous() for t in scales]
        else:
            scales[0] = scales[0].transpose(0, 1)  # (G, T, K/block)
        nothing = room(torch.float32, 1)  # where there is no global scale, at which nobody looks
        divisors = (nothing if t is None else t.view(1) for t in (o.x_global, o.weight_global))
        x, weight = (_aligned(t, all(n % 16 == 0 for n in (t.shape[-1], *t.stride()[:-1]))) for t in (o.x, o.weight))
        numbers = room(torch.bfloat16, p.tokens, p.groups, columns)
        factors = room(torch.bfloat16, p.groups, p.n, columns // BLOCK[p.format])
        run(
            x, scales[0], next(divisors), weight, scales[1], next(divisors), numbers, factors, o.out,
            p.k // BLOCK[p.format],
        )  # fmt: skip

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
