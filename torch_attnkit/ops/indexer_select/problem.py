"""A call of indexer_select as a problem of the indexer's selection."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.indexer.problem import Selection, SelectOperands
from torch_attnkit.ops.indexer_scores import problem as scores


def problem(call: Call) -> Selection:
    return Selection(scores.problem(call), call.dim["K"])


def operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format, topk, indices) -> SelectOperands:
    given = scores.operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format, indices)
    return SelectOperands(given, indices)
