"""Host side of queries at the end of a cache, which every architecture solves in its own way."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch_attnkit.core.target import Target

from .problem import Operands, Problem


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D), on ``target``."""
    module = importlib.import_module(f"torch_attnkit.kernels.prefill.{target.arch}.cached")
    run: Callable[[Operands], None] = module.launcher(problem, target)
    return run
