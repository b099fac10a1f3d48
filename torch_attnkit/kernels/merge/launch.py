"""Host side of the merge kernels for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from .plan import configure
from .problem import Operands, Problem

_VECTOR = 16  # bytes of the widest loads and stores


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.rows * problem.heads == 0:
        return lambda operands: None
    sms, widest = driver.sm_count(problem.device), width(problem)
    wide = kernel(problem, target, sms, widest)
    narrow: list[Callable[..., None]] = []

    def launch(operands: Operands) -> None:
        run = wide
        if widest > 1 and operands.part.data_ptr() & 15:
            if not narrow:
                narrow.append(kernel(problem, target, sms, 1))
            run = narrow[0]
        run(*operands)

    return launch


def width(problem: Problem) -> int:
    """Elements of the widest vectors that sizes and strides allow."""
    steps = (problem.dim_v, *problem.part[:-1])
    most = _VECTOR // min(problem.dtype.itemsize, problem.out_dtype.itemsize)
    return next(v for v in (8, 4, 2, 1) if v <= most and all(s % v == 0 for s in steps))


def kernel(problem: Problem, target: Target, sms: int, width: int) -> Callable[..., None]:
    """The kernel that reads vectors of ``width`` elements; it takes the tensors of ``Operands``."""
    p = problem
    return compile.launcher(
        target,
        p.device,
        trace,
        dtypes=(short(p.dtype), short(p.out_dtype)),
        sink=p.sink,
        row_sum=p.row_sum is not None,
        config=astuple(configure(p.parts, p.rows * p.heads, p.dim_v, width, sms)),
    )


def dense(
    dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int, int], *, sink: bool
) -> Problem:
    """The problem of contiguous, normalised partials (P, R, H, Dv)."""
    P, R, H, Dv = shape
    return Problem(
        dtype, out_dtype, device, P, R, H, Dv, part=(R * H * Dv, H * Dv, Dv, 1), lse=(R * H, H, 1), sink=sink
    )


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
