"""A call of linear_decode as a problem of the products of few tokens."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.batched_gemm.few import FewOperands, FewProblem


def problem(call: Call) -> FewProblem:
    a, d = call.arg, call.dim
    return FewProblem(call.device, a.x.dtype, d["Tq"], d["K"], d["N"], a.bias is not None)


def operands(x, weight, bias, out) -> FewOperands:
    return FewOperands(x, weight, bias, out)
