"""Host side of the indexer on NVIDIA GPUs: scores, and selection of the largest, fused or behind the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace
from torch_attnkit.kernels.topk import launch as topk
from torch_attnkit.kernels.topk import problem as rows

from .problem import Operands, Problem, Selection, SelectOperands
from .sm80 import launch as ampere
from .sm90 import launch as hopper
from .sm90 import plan as hopper_plan
from .sm100 import launch as blackwell

_SCORES = {"sm90": hopper.launcher, "sm100": blackwell.launcher}  # by ``mma.sync`` elsewhere


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.tokens * problem.entries == 0:
        return lambda operands: None
    return _SCORES.get(target.arch, ampere.launcher)(problem, target)


def select_launcher(problem: Selection, target: Target) -> Callable[[SelectOperands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem.scores
    if target.arch == "sm90" and p.entries and hopper_plan.streams(p):
        blocks = min(driver.sm_count(p.device), -(-p.entries // hopper_plan.TILE))
        config = hopper_plan.selects(p, hopper.stream_config(p, alone=True), blocks)
        if config is not None:
            return _fused(problem, config, blocks, target)
    return _two_launches(problem, target)


def _fused(problem: Selection, config: Any, blocks: int, target: Target) -> Callable[[SelectOperands], None]:
    """One cooperative launch, scores stay in shared memory; two launches if TMA cannot read the keys."""
    p = problem.scores
    run = compile.launcher(
        target, p.device, hopper.trace_select,
        config=(*astuple(config.stream), config.capacity),
    )  # fmt: skip
    read = hopper.queries(p, target)
    workspace = Workspace(p.device, config.sums + 2 * blocks * p.tokens, 2 * hopper_plan.LINE)
    others: list[Callable[[SelectOperands], None]] = []

    def launch(o: SelectOperands) -> None:
        if not hopper.streamable(o.given, config.stream):
            if not others:
                others.append(_two_launches(problem, target))
            return others[0](o)
        sums, arrivals = workspace.get()
        exchange = sums.view(torch.int32), arrivals
        run(*hopper.streamed(o.given, read(o.given), config.stream), o.indices, exchange, (p.entries, blocks))

    return launch


def _two_launches(problem: Selection, target: Target) -> Callable[[SelectOperands], None]:
    """Scores to a temporary tensor, then top-k."""
    p = problem.scores
    score = launcher(p, target)
    row = rows.Problem(p.device, torch.float32, p.tokens, p.entries, problem.topk, p.entries, ragged=True)
    choose = topk.launcher(row, target)

    def launch(o: SelectOperands) -> None:
        made = torch.empty(p.tokens, p.entries, dtype=torch.float32, device=o.indices.device)  # (T, S)
        score(o.given._replace(scores=made))
        choose(rows.Operands(made, o.given.k_len, o.indices))

    return launch
