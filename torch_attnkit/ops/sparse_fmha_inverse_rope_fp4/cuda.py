"""sparse_fmha_inverse_rope_fp4 on Hopper and Blackwell: the kernels are the family ``kernels/sparse``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.sparse.quantised import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
