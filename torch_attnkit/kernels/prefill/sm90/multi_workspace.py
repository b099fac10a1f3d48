"""Workspaces of persistent CTAs: device memory for splits, and a counter that deals work tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.cuda.workspace import Workspace

from ..problem import Problem
from . import multi_plan


def of_splits(problem: Problem, plan: multi_plan.Plan) -> Callable[[], tuple[Any, ...]]:
    """What a launch of persistent CTAs takes as its ``SplitWorkspace``; nothing where there are none."""
    p, tiles, ctas = problem, plan.tiles, plan.persistent
    if ctas == 0:
        return lambda: ()
    workspace = Workspace(p.device, 2 * ctas * multi_plan.split_floats(tiles.tile_m, p.dim_v), ctas)
    start = multi_plan.start(tiles, (p.dim + p.dim_v) * p.dtype.itemsize)
    return lambda: ((*workspace.get(), ctas, start),)


def of_draws(problem: Problem, ctas: int, section: int = 0) -> Callable[[], tuple[Any, ...]]:
    """What a launch of ``ctas`` persistent CTAs takes that draw their work tiles (``dynamic_types.Draws``)."""
    workspace = Workspace(problem.device, 1, 1)
    return lambda: ((workspace.get()[1], ctas, section),)
