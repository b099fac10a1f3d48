"""gated_rmsnorm_backward on Hopper and Blackwell: the kernels are the family ``kernels/norm_backward``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.norm_backward.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
