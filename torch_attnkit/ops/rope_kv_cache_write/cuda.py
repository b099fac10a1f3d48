"""rope_kv_cache_write on Hopper and Blackwell: the kernel is of the family ``kernels/cache``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.cache.rope_launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
