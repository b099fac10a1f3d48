"""indexer_select on Metal: the kernels are the families ``kernels/indexer`` and ``kernels/topk``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.indexer import metal
from torch_attnkit.ops.indexer_scores.mps import steps

from .problem import operands, problem


def build(call: Call, target: Target) -> Callable[..., None]:
    run = metal.select_launcher("indexer_select", problem(call), steps(call), target)
    return lambda *arguments: run(operands(*arguments))
