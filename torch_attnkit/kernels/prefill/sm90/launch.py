"""Host side of dense and packed batches on Hopper: persistent CTAs draw their work tiles, or have them by rounds
(``prefill.py``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from .. import launch as by_rounds
from ..problem import Operands, Problem
from . import dynamic_plan, multi_workspace
from .cached import scalars_of


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    p = by_rounds.without_idle_window(problem)
    plan = dynamic_plan.plan(p, driver.sm_count(p.device))
    if plan is None:
        return by_rounds.launcher(problem, target)
    run = compile.launcher(
        target, p.device, "torch_attnkit.kernels.prefill.sm90.dynamic_kernel",
        trace="trace_packed_dynamic" if p.packed else "trace_dense_dynamic", **dynamic_plan.signature(p, plan.tiles),
    )  # fmt: skip
    workspace = multi_workspace.of_draws(p, plan.ctas, plan.section)
    start = by_rounds.reading(lambda *arguments: run(*arguments, *workspace()), p, scalars_of(p, 1))
    unread = torch.empty(p.heads, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys) == 0

    def launch(o: Operands) -> None:
        if nothing:
            return by_rounds.nothing_attended(o)
        start(o if o.sink is not None else o._replace(sink=unread))

    return launch
