"""Host side of the norm kernels for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.limits import LIMITS

from .plan import configure
from .problem import Operands, Problem, merged_axes


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p, n = problem, problem.n
    if p.rows == 0:
        return lambda operands: None
    sizes, y_steps, z_steps = zip(*merged_axes(p.batch, p.y, p.z), strict=True)
    most = 16 // p.dtype.itemsize  # elements of a vector
    widest = next(v for v in (8, 4, 2, 1) if v <= most and all(s % v == 0 for s in (n, *y_steps, *z_steps)))
    nbytes = p.rows * n * (p.y_dtype.itemsize + 2 * p.dtype.itemsize)

    def compiled(width: int) -> Callable[..., None]:
        config = configure(n, p.rows, width, nbytes, driver.sm_count(p.device), LIMITS[target.arch].clusters)
        even = n == config.width * config.lanes * config.vectors * config.cluster
        return compile.launcher(
            target,
            p.device,
            trace,
            dtypes=tuple(short(d) for d in (p.y_dtype, p.dtype, p.w_dtype)),
            rank=len(p.batch) + 1,
            groups=len(sizes),
            config=astuple(config),
            even=even,
        )

    wide = compiled(widest)
    # The bits of no vector's address.
    y_odd, z_odd, w_odd = (widest * d.itemsize - 1 for d in (p.y_dtype, p.dtype, p.w_dtype))
    narrow: list[Callable[..., None]] = []

    def launch(operands: Operands) -> None:
        y, z, w, eps, out = operands
        aligned = not (y.data_ptr() & y_odd | z.data_ptr() & z_odd | w.data_ptr() & w_odd)
        if not aligned and not narrow:
            narrow.append(compiled(1))
        run = wide if aligned else narrow[0]
        run(y, z, w, out, n, sizes, y_steps, z_steps, eps, 1.0 / n)

    return launch


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)
