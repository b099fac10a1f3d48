"""Where persistent CTAs of a launch join splits; host side. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.cuda.workspace import Workspace

from . import multi_plan


def meeting(device: torch.device, tiles: multi_plan.Tiles, dim_v: int, ctas: int) -> Callable[[], tuple[Any, ...]]:
    """What a launch of ``ctas`` persistent CTAs takes beside its other arguments; nothing where there are none."""
    if ctas == 0:
        return lambda: ()
    floats = 2 * ctas * multi_plan.split_floats(tiles.tile_m, dim_v)
    workspace = Workspace(device, floats, ctas * multi_plan.COUNTERS)
    return lambda: ((*workspace.get(), ctas),)
