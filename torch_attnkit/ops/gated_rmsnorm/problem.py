"""A call of gated_rmsnorm as a problem of the norm kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.norm.problem import Operands, Problem


def problem(call: Call) -> Problem:
    y, z, w = call.arg.y, call.arg.z, call.arg.w
    return Problem(call.device, y.dtype, z.dtype, w.dtype, call.dim["N"], call.batch, y.stride()[:-1], z.stride()[:-1])


def operands(y, z, w, eps, out) -> Operands:
    return Operands(y, z, w, eps, out)
