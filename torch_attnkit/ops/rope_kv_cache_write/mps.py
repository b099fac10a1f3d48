"""rope_kv_cache_write on Metal: the kernel is of the family ``kernels/cache``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.cache import rope_metal

from .problem import operands, problem

build = solved_by(partial(rope_metal.launcher, "rope_kv_cache_write"), problem, operands)
