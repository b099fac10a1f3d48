"""Host side of the routing kernels for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from .plan import configure
from .problem import Operands, Problem, TableOperands, TableProblem

_VECTOR = 16  # bytes of the widest loads


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    most = _VECTOR // p.dtype.itemsize
    widest = next(w for w in (8, 4, 2, 1) if w <= most and p.step % w == 0)

    def compiled(widest: int) -> tuple[Callable[..., None], int]:
        config = configure(p.experts, p.topk, p.rows, widest, driver.sm_count(p.device))
        run = compile.launcher(
            target,
            p.device,
            trace,
            dtype=short(p.dtype),
            scoring=p.scoring,
            bias=p.bias,
            over_all=p.over_all,
            renormalize=p.renormalize,
            config=astuple(config),
        )
        return run, config.width

    wide, width = compiled(widest)
    # The bits of no vector's address.
    odd, bias_odd = width * p.dtype.itemsize - 1, min(_VECTOR, 4 * width) - 1
    narrow: list[Callable[..., None]] = []

    def launch(operands: Operands) -> None:
        logits, bias, *_ = operands
        aligned = not (logits.data_ptr() & odd or (bias is not None and bias.data_ptr() & bias_odd))
        if not aligned and not narrow:
            narrow.append(compiled(1)[0])
        (wide if aligned else narrow[0])(*operands)

    return launch


def table_launcher(problem: TableProblem, target: Target) -> Callable[[TableOperands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    run = compile.launcher(
        target,
        p.device,
        trace_table,
        dtypes=tuple(short(d) for d in (p.dtype, p.id_dtype, p.table_dtype)),
        topk=p.topk,
        renormalize=p.renormalize,
    )
    return lambda operands: run(*operands)


def trace(arch: str, **signature: Any) -> compile.Traced:
    """``kernel.py``."""
    from . import kernel

    return kernel.trace(arch, **signature)


def trace_table(arch: str, **signature: Any) -> compile.Traced:
    """``table.py``."""
    from . import table

    return table.trace(arch, **signature)
