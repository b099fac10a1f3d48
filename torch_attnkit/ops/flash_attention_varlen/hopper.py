"""flash_attention_varlen on Hopper: the kernels are of the family ``kernels/prefill``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.prefill.sm90.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
