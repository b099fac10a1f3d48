"""mxfp4_dequantize on Metal: the kernels are the family ``kernels/fp4``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.fp4 import metal

from .problem import operands, problem

build = solved_by(partial(metal.dequantizer, "mxfp4_dequantize"), problem, operands)
