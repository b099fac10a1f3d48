"""Host side of the kernels on cache rows for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from . import plan
from .problem import Operands, Problem


def writer(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What writes the rows of ``problem`` to their slots on ``target``. Numbers that share memory with the cache are
    copied first, so that no row is overwritten before it is read."""
    p, run = problem, _launcher(problem, target, gather=False)
    span = (max(p.rows - 1, 0) * p.step + p.row.head_dim) * p.dtype.itemsize  # bytes
    cache_span = ((p.slots - 1) * p.cache_step + p.row.size) * p.cache_dtype.itemsize

    def launch(operands: Operands) -> None:
        ahead = operands.cache.data_ptr() - operands.numbers.data_ptr()
        if -cache_span < ahead < span:
            operands = operands._replace(numbers=operands.numbers.clone())
        run(operands)

    return launch


def gatherer(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What gathers the rows of ``problem`` from their slots on ``target``."""
    return _launcher(problem, target, gather=True)


def _launcher(p: Problem, target: Target, *, gather: bool) -> Callable[[Operands], None]:
    if p.rows * p.row.head_dim == 0 or (p.slots == 0 and not gather):
        return lambda operands: None
    sms = driver.sm_count(p.device)

    def compiled(width: int, align: int) -> Callable[..., None]:
        dtypes = tuple(short(d) for d in (p.dtype, p.cache_dtype, p.slot_dtype))
        signature: dict[str, Any] = dict(row=astuple(p.row), dtypes=dtypes)
        if p.row.plain:
            config = plan.plain(width, p.row.head_dim, p.rows, sms)
            run = compile.launcher(
                target,
                p.device,
                trace_plain,
                gather=gather,
                config=astuple(config),
                **signature,
            )
            return lambda numbers, cache, slot, global_scale: run(numbers, cache, slot)
        config = plan.encoded(p.row, width, align, p.rows, sms)
        write, read = trace_write, trace_gather
        signature |= dict(global_scale=p.global_scale, align=align, config=astuple(config))
        return compile.launcher(target, p.device, read if gather else write, **signature)

    width, align = plan.width(p), plan.align(p)
    wide = compiled(width, align)
    # The bits of no vector's address.
    odd = plan.vector_bytes(width, p.dtype) - 1
    cache_odd = (plan.vector_bytes(width, p.cache_dtype) if p.row.plain else align) - 1
    narrow: list[Callable[..., None]] = []

    def launch(operands: Operands) -> None:
        run = wide
        if operands.numbers.data_ptr() & odd | operands.cache.data_ptr() & cache_odd:
            if not narrow:
                narrow.append(compiled(1, 1))
            run = narrow[0]
        run(*operands)

    return launch


def trace_plain(arch: str, **signature: Any) -> compile.Traced:
    """``plain_kernel.py``."""
    from . import plain_kernel

    return plain_kernel.trace(arch, **signature)


def trace_write(arch: str, **signature: Any) -> compile.Traced:
    """``write_kernel.py``."""
    from . import write_kernel

    return write_kernel.trace(arch, **signature)


def trace_gather(arch: str, **signature: Any) -> compile.Traced:
    """``gather_kernel.py``."""
    from . import gather_kernel

    return gather_kernel.trace(arch, **signature)
