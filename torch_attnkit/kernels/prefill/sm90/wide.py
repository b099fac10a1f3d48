"""Host side of ``halves.py``: dense and packed batches with wide heads on Hopper."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import nothing_attended, reading, scalars, section
from ..problem import Operands, Problem
from . import halves_plan, plan


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    p, signature = problem, halves_plan.signature(problem)
    lengths = {} if p.packed else dict(kv_len=p.kv_len, kv_start=p.kv_start)
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.halves_kernel",
        trace="trace_packed" if p.packed else "trace_dense", **signature, **lengths,
    )  # fmt: skip
    together = 1 if p.packed else section(p, plan.sharers(p, signature))
    start = reading(run, p, scalars(p.scores, together, driver.sm_count(p.device)))
    nothing = p.keys == 0 or (p.packed and p.batch == 0)

    def launch(operands: Operands) -> None:
        if nothing:
            nothing_attended(operands)
        elif operands.lse.numel():
            start(operands)

    return launch
