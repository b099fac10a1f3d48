"""Host side of ``paged_multi_codes.py``: blocks of queries over pages of E4M3 on Hopper."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.target import Target

from ..paged import Operands, Problem
from . import paged, paged_codes_plan

_KERNEL = "torch_attnkit.kernels.prefill.sm90.paged_codes_kernel"


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``."""
    return paged.launcher_of(problem, target, _KERNEL, paged_codes_plan)
