"""Host side of ``paged_multi_codes.py``: tiles, clusters, and how keys are loaded."""

from __future__ import annotations

from typing import Any

from ..paged import Problem
from . import multi_codes_plan, paged_plan
from .paged_plan import Plan


def plan(problem: Problem, sms: int) -> Plan:
    """By the model of 16 bits; no CTA draws."""
    return paged_plan.plan(problem, sms, multi_codes_plan.TILES, drawn={})


def signature(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return multi_codes_plan.signature(problem.attention, plan.tiles) | {"page": problem.page, "box": plan.box}
