"""flash_attention_paged on Hopper over E4M3, by a kernel of its own in the family ``kernels/prefill``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.prefill.sm90.paged_codes import launcher
from torch_attnkit.oracle.hopper_sums import TensorCoreSums

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
arithmetic = TensorCoreSums
