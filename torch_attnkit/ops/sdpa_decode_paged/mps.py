"""sdpa_decode_paged on Metal: the kernels are the family ``kernels/decode``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.decode import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "sdpa_decode_paged"), problem, operands)
