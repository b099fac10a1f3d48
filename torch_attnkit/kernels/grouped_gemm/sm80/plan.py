"""The routed experts before Hopper: plans of its kernel by ``mma.sync``, without bulk copies, in 99 KB."""

from __future__ import annotations

from ..problem import Problem
from ..sm90.config import SHARED_SMALL
from ..sm90.plan import Plan, by_mma


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    return by_mma(problem, sms, SHARED_SMALL, bulk=False)
