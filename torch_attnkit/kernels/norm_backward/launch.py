"""Host side of the norm's backward for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core import memory
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.kernels.norm.problem import merged_axes

from .plan import blocks_of, configure
from .problem import Operands, Problem, nothing


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``: the rows, then the sums over them."""
    p, n = problem, problem.n
    if p.rows == 0:
        return nothing
    merged = merged_axes(p.batch, p.grad, p.y, p.z)
    axes = tuple(value for axis in merged for value in axis)
    steps = [step for axis in merged for step in axis[1:]]
    most = 16 // p.dtype.itemsize  # elements of a vector
    widest = next(v for v in (8, 4, 2, 1) if v <= most and all(s % v == 0 for s in (n, *steps)))
    dtypes = tuple(short(d) for d in (p.y_dtype, p.dtype, p.w_dtype))

    def compiled(width: int) -> tuple[int, Callable[..., None]]:
        config = configure(n, width)
        even = config.vectors > 0 and n == config.width * config.lanes * config.vectors
        run = compile.launcher(
            target, p.device, trace, dtypes=dtypes, rank=len(p.batch) + 1, groups=len(merged),
            config=astuple(config), even=even,
        )  # fmt: skip
        return blocks_of(config, p.rows, driver.sm_count(p.device)), run

    wide = compiled(widest)
    total = compile.launcher(target, p.device, trace_sums, dtype=dtypes[2])
    # The bits of no vector's address.
    odd = [widest * d.itemsize - 1 for d in (p.dtype, p.y_dtype, p.dtype, p.w_dtype)]
    narrow: list[tuple[int, Callable[..., None]]] = []

    def launch(o: Operands) -> None:
        aligned = not any(t.data_ptr() & bits for t, bits in zip((o.grad, o.y, o.z, o.w), odd, strict=True))
        if not aligned and not narrow:
            narrow.append(compiled(1))
        blocks, run = wide if aligned else narrow[0]
        sums = memory.empty((blocks, n), dtype=torch.float32, device=p.device)
        run(o.grad, o.y, o.z, o.w, o.dy, o.dz, sums, n, axes, o.eps)
        total(sums, o.dw)

    return launch


def trace(arch: str, **signature: Any) -> compile.Traced:
    """The rows."""
    from . import kernel

    return kernel.trace(arch, **signature)


def trace_sums(arch: str, **signature: Any) -> compile.Traced:
    """The sums over them."""
    from . import kernel

    return kernel.trace_sums(arch, **signature)
