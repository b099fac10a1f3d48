"""fp4_moe on Metal: the kernels are the family ``kernels/grouped_gemm``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.grouped_gemm import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "fp4_moe"), problem, operands)
