"""Host side of the indexer's selection for NVIDIA GPUs: the entries with the largest scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ..topk import launch as topk
from ..topk import problem as rows
from . import launch as scores
from .problem import Operands as Scored
from .problem import Problem as Scores
from .sm90 import launch as host
from .sm90 import plan


@dataclass(frozen=True)
class Selection:
    """Which ``topk`` entries of a request each token's scores choose."""

    scores: Scores
    topk: int


class Operands(NamedTuple):
    """The tensors of one call."""

    given: Scored  # until there are scores, the indices are in their place
    indices: torch.Tensor  # (T, K) int32, contiguous


def launcher(problem: Selection, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem.scores
    if target.arch == "sm90" and p.entries and plan.streams(p):
        blocks = min(driver.sm_count(p.device), -(-p.entries // plan.TILE))
        config = plan.selects(p, host.stream_config(p, alone=True), blocks)
        if config is not None:
            return _together(problem, config, blocks, target)
    return _in_turn(problem, target)


def _together(problem: Selection, config: Any, blocks: int, target: Target) -> Callable[[Operands], None]:
    """One launch, in which scores stay in shared memory; keys whose address is none for TMA go the other way."""
    p = problem.scores
    run = compile.launcher(
        target, p.device, host.trace_select,
        config=(*astuple(config.stream), config.room),
    )  # fmt: skip
    read = host.queries(p, target)
    workspace = Workspace(p.device, config.sums + 2 * blocks * p.tokens, 2 * plan.LINE)
    others: list[Callable[[Operands], None]] = []

    def launch(o: Operands) -> None:
        if not host.streamable(o.given, config.stream):
            if not others:
                others.append(_in_turn(problem, target))
            return others[0](o)
        sums, arrivals = workspace.get()
        meeting = sums.view(torch.int32), arrivals
        run(*host.streamed(o.given, read(o.given), config.stream), o.indices, meeting, (p.entries, blocks))

    return launch


def _in_turn(problem: Selection, target: Target) -> Callable[[Operands], None]:
    """Scores into memory of the call's own, and a selection that reads them, one launch behind the other."""
    p = problem.scores
    score = scores.launcher(p, target)
    row = rows.Problem(p.device, torch.float32, p.tokens, p.entries, problem.topk, p.entries, ragged=True)
    choose = topk.launcher(row, target)

    def launch(o: Operands) -> None:
        made = torch.empty(p.tokens, p.entries, dtype=torch.float32, device=o.indices.device)  # (T, S)
        score(o.given._replace(scores=made))
        choose(rows.Operands(made, o.given.k_len, o.indices))

    return launch
