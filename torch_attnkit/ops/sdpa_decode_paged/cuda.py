"""sdpa_decode_paged on Hopper and Blackwell: the kernels are the family ``kernels/decode``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.decode.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
