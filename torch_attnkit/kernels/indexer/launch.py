"""Host side of the indexer's scores for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target

from .problem import Operands, Problem
from .sm90.launch import launcher as hopper
from .sm100.launch import launcher as blackwell


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.tokens * problem.entries == 0:
        return lambda operands: None
    return (hopper if target.arch == "sm90" else blackwell)(problem, target)
