"""A call of indexer_scores as a problem of the indexer's kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.indexer.problem import Operands, Problem
from torch_attnkit.kernels.prefill.problem import Layout


def problem(call: Call) -> Problem:
    q, k = call.arg.q, call.arg.k
    given = (getattr(call.arg, name) is not None for name in ("request_ids", "block_table", "q_scale", "k_scale"))
    T, R, S, H, D = (call.dim[axis] for axis in ("Tq", "R", "S", "Hi", "Qb"))
    return Problem(
        call.device, q.dtype, call.arg.weights.dtype, T, R, S, H, D, Layout.of(q), k.stride()[:-1], *given
    )


def operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format, scores) -> Operands:
    return Operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, scores)
