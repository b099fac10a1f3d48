"""kv_cache_gather on Metal: the kernels are the family ``kernels/cache``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.cache import metal

from .problem import operands, problem

build = solved_by(partial(metal.gatherer, "kv_cache_gather"), problem, operands)
