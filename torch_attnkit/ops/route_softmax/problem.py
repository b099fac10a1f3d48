"""A call of route_softmax as a problem of the routing kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.routing.problem import Operands, Problem


def problem(call: Call) -> Problem:
    R, E, K = (call.dim[axis] for axis in "REK")
    step = call.arg.logits.stride(0)
    return Problem(
        call.device, call.dtype, "softmax", R, E, K, step,
        bias=False, over_all=call.arg.softmax_first, renormalize=call.arg.renormalize,
    )  # fmt: skip


def operands(logits, topk, softmax_first, renormalize, route_scale, weights, indices) -> Operands:
    return Operands(logits, None, weights, indices, route_scale)
