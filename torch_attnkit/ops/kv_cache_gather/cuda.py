"""kv_cache_gather on Hopper and Blackwell: the kernels are the family ``kernels/cache``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.cache.launch import gatherer

from .problem import operands, problem

build = solved_by(gatherer, problem, operands)
