"""A call of indexer_topk as a problem of the top-k kernel."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.topk.problem import Operands, Problem


def problem(call: Call) -> Problem:
    T, S, K = (call.dim[axis] for axis in ("Tq", "S", "K"))
    ragged = call.arg.k_len is not None
    return Problem(call.device, call.dtype, T, S, K, call.arg.scores.stride(0), ragged)


def operands(scores, k_len, topk, indices) -> Operands:
    return Operands(scores, k_len, indices)
