"""merge_partials on Metal: the kernels are the family ``kernels/merge``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.merge import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "merge_partials"), problem, operands)
