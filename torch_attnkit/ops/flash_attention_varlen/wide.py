"""flash_attention_varlen on Hopper with wide heads, by a kernel of their own in the family ``kernels/prefill``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.prefill.wide import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
