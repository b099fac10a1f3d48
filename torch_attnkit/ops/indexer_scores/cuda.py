"""indexer_scores on Hopper and Blackwell: the kernel is the family ``kernels/indexer``."""

from __future__ import annotations

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.indexer.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)
