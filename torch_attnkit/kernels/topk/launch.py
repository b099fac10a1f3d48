"""Host side of the top-k kernel for NVIDIA GPUs. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from .plan import configure
from .problem import Operands, Problem

_VECTOR = 16  # bytes of the widest loads


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    if p.rows == 0:
        return lambda operands: None
    most = _VECTOR // p.dtype.itemsize
    widest = next(w for w in (8, 4, 2, 1) if w <= most and p.entries % w == 0 and p.step % w == 0)

    sms = driver.sm_count(p.device)

    def compiled(width: int) -> tuple[Callable[..., None], int]:
        config = configure(p.entries, p.rows, width, sms)
        run = compile.launcher(
            target,
            p.device,
            "torch_attnkit.kernels.topk.kernel",
            dtype=short(p.dtype),
            ragged=p.ragged,
            config=astuple(config),
        )
        return run, max(1, sms * config.blocks // config.cluster)

    wide = compiled(widest)
    odd = widest * p.dtype.itemsize - 1  # the bits of no vector's address
    narrow: list[tuple[Callable[..., None], int]] = []

    def launch(operands: Operands) -> None:
        aligned = not operands.scores.data_ptr() & odd
        if not aligned and not narrow:
            narrow.append(compiled(1))
        run, ahead = wide if aligned else narrow[0]
        run(*operands, ahead)

    return launch
