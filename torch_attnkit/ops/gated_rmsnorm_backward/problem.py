"""A call of gated_rmsnorm_backward as a problem of the norm's backward."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.norm_backward.problem import Operands, Problem


def problem(call: Call) -> Problem:
    grad, y, z, w = call.arg.grad, call.arg.y, call.arg.z, call.arg.w
    steps = (t.stride()[:-1] for t in (grad, y, z))
    return Problem(call.device, call.dim["N"], call.batch, y.dtype, z.dtype, w.dtype, *steps)


def operands(grad, y, z, w, eps, dy, dz, dw) -> Operands:
    return Operands(grad, y, z, w, eps, dy, dz, dw)
