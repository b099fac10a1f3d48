"""A call of route_sqrt_softplus as a problem of the routing kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.routing.problem import Operands, Problem


def problem(call: Call) -> Problem:
    R, E, K = (call.dim[axis] for axis in "REK")
    step = call.arg.logits.stride(0)
    return Problem(
        call.device, call.dtype, "sqrt_softplus", R, E, K, step,
        bias=call.arg.bias is not None, over_all=False, renormalize=call.arg.renormalize,
    )  # fmt: skip


def operands(logits, bias, topk, route_scale, renormalize, weights, indices) -> Operands:
    return Operands(logits, bias, weights, indices, route_scale)
