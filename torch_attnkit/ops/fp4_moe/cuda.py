"""fp4_moe on Hopper: the kernels are the family ``kernels/grouped_gemm``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.grouped_gemm.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
