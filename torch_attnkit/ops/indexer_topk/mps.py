"""indexer_topk on Metal: the kernel is the family ``kernels/topk``."""

from __future__ import annotations

from functools import partial

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.topk import metal

from .problem import operands, problem

build = solved_by(partial(metal.launcher, "indexer_topk"), problem, operands)
