"""A call of indexer_scores as a problem of the indexer's kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.indexer.problem import Operands, Problem
from torch_attnkit.kernels.prefill.problem import Layout


def problem(call: Call) -> Problem:
    a, four = call.arg, call.arg.format == "mxfp4"
    given = (tensor is not None for tensor in (a.request_ids, a.block_table, a.q_scale))
    T, R, S, H, D = (call.dim[axis] for axis in ("Tq", "R", "S", "Hi", "Qb"))
    q_scale_steps = a.q_scale.stride()[:-1] if four else ()
    return Problem(
        call.device, a.format, a.q.dtype, a.weights.dtype, T, R, S, H, D * (2 if four else 1), Layout.of(a.q),
        q_scale_steps, a.k.stride()[:-1], call.dim["Sk"], *given,
    )  # fmt: skip


def operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format, scores) -> Operands:
    return Operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, scores)
