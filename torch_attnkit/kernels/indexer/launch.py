"""Host side of the indexer's scores for NVIDIA GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch_attnkit.core.target import Target

from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    if problem.tokens * problem.entries == 0:
        return lambda operands: None
    launch = importlib.import_module(f"torch_attnkit.kernels.indexer.{target.arch}.launch")
    found: Callable[[Operands], None] = launch.launcher(problem, target)
    return found
