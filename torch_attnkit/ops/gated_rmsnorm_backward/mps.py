"""gated_rmsnorm_backward on Metal: the kernels are the family ``kernels/norm_backward``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.norm_backward import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "gated_rmsnorm_backward"), problem, operands)
