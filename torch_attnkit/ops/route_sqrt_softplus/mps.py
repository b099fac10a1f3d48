"""route_sqrt_softplus on Metal: the kernels are the family ``kernels/routing``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.routing import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "route_sqrt_softplus"), problem, operands)
