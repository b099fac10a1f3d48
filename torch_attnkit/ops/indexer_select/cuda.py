"""indexer_select on Hopper and Blackwell: the kernels are the families ``kernels/indexer`` and ``kernels/topk``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.indexer.select import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
