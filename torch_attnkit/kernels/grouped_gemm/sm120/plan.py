"""The routed experts in 99 KB of shared memory: for any number of tokens Hopper's kernel of few, by ``mma.sync``."""

from __future__ import annotations

from ..problem import Problem
from ..sm90.config import SHARED_SMALL
from ..sm90.plan import Plan, by_mma


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    return by_mma(problem, sms, SHARED_SMALL)
