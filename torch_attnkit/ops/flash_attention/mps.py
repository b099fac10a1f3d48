"""flash_attention on Metal: the kernels are the family ``kernels/prefill``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.prefill import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "flash_attention"), problem, operands)
