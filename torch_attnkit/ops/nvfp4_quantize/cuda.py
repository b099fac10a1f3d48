"""nvfp4_quantize on Hopper and Blackwell: the kernels are the family ``kernels/fp4``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.fp4.launch import quantizer

from .problem import operands, problem

build = solved_by(quantizer, problem, operands)
