"""Host side of heads too wide for an architecture's ordinary kernel, where another one solves them. Imports no
cutlass."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch_attnkit.core.target import Target

from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, of dense batches or packed sequences, on ``target``."""
    module = importlib.import_module(f"torch_attnkit.kernels.prefill.{target.arch}.wide")
    run: Callable[[Operands], None] = module.launcher(problem, target)
    return run
