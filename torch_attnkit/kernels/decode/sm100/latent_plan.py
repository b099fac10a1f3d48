"""How a launch over latents is cut on Blackwell: ``tcgen05.py`` takes them, for any number of heads. No cutlass."""

from __future__ import annotations

from ..plan import Plan
from ..problem import Problem
from .plan import clusters


def plan(problem: Problem, sms: int, *, same: bool) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors; ``same``: values are the first columns of the keys."""
    return clusters(problem, problem.scores.most_keys(problem.capacity), sms, same)
