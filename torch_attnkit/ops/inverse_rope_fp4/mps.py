"""inverse_rope_fp4 on Metal: the kernel is of the family ``kernels/fp4``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.fp4 import metal

from .problem import operands, problem

build = solved_by(partial(metal.rope_quantizer, "inverse_rope_fp4"), problem, operands)
