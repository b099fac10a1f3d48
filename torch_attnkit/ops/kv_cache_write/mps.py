"""kv_cache_write on Metal: the kernels are the family ``kernels/cache``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.cache import metal

from .problem import operands, problem

build = solved_by(partial(metal.writer, "kv_cache_write"), problem, operands)
