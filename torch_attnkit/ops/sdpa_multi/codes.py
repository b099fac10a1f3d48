"""sdpa_multi on Hopper over E4M3, by kernels of their own in the family ``kernels/prefill``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.prefill.sm90.codes_cached import launcher
from torch_attnkit.oracle.hopper_sums import TensorCoreSums

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
arithmetic = TensorCoreSums
