"""A call of indexer_scores as a problem of the indexer's kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.indexer.problem import Operands, Problem
from torch_attnkit.kernels.prefill.problem import Layout


def problem(call: Call) -> Problem:
    a, four = call.arg, call.arg.format == "mxfp4"
    ids, paged, q_scale = (tensor is not None for tensor in (a.request_ids, a.block_table, a.q_scale))
    T, R, S, H, D = (call.dim[axis] for axis in ("Tq", "R", "S", "Hi", "Qb"))
    scale_steps = [t.stride()[:-1] for t in (a.q_scale, a.k_scale)] if four else [(), ()]
    return Problem(
        call.device, a.format, a.q.dtype, a.weights.dtype, T, R, S, H, D * (2 if four else 1), Layout.of(a.q),
        scale_steps[0], a.k.stride()[:-1], call.dim["Sk"], ids, paged, q_scale, scale_steps[1],
    )  # fmt: skip


def operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format, scores) -> Operands:
    return Operands(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, scores)
