"""inverse_rope_fp4 on Hopper and Blackwell: the kernel is of the family ``kernels/fp4``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.fp4.launch import rope_quantizer

from .problem import operands, problem

build = solved_by(rope_quantizer, problem, operands)
