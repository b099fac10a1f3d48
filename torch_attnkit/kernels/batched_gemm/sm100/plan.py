"""What Blackwell has kernels of its own for. Imports no cutlass."""

from __future__ import annotations

from ..problem import Problem


def tile(problem: Problem, sms: int) -> None:
    """Nothing: products are by ``mma.sync``, as ``../plan.py`` cuts them."""
