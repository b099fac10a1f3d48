"""indexer_scores on Metal: the kernel is the family ``kernels/indexer``."""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.indexer import metal

from .problem import operands, problem


def steps(call: Call) -> metal.Steps:
    """Of the tensors of a call."""
    a = call.arg
    q_scale, k_scale = ((0, 0) if t is None else t.stride()[:-1] for t in (a.q_scale, a.k_scale))
    table_row = 0 if a.block_table is None else a.block_table.stride(0)
    return metal.Steps(
        a.q.stride()[:-1], q_scale, a.weights.stride(0), a.k.stride()[:-1], k_scale, a.k.shape[0], table_row
    )


def build(call: Call, target: Target) -> Callable[..., None]:
    run = metal.launcher("indexer_scores", problem(call), steps(call), target)
    return lambda *arguments: run(operands(*arguments))
