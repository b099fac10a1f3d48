"""A call of route_hash as a problem of the routing kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.routing.problem import TableOperands, TableProblem


def problem(call: Call) -> TableProblem:
    ids, table = call.arg.token_ids, call.arg.tid2eid
    return TableProblem(
        call.device, call.dtype, ids.dtype, table.dtype, call.dim["R"], call.dim["K"], call.arg.renormalize
    )


def operands(logits, token_ids, tid2eid, route_scale, renormalize, weights, indices) -> TableOperands:
    return TableOperands(logits, token_ids, tid2eid, weights, indices, route_scale)
