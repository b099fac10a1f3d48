"""A call of grouped_output_projection as a problem of the products of groups."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.batched_gemm.problem import Operands, Problem


def problem(call: Call) -> Problem:
    a, dim = call.arg, call.dim
    return Problem(
        call.device, a.o.dtype, a.dtype or a.o.dtype, dim["Tq"], dim["G"], dim["Ko"], dim["R"], _steps(a.o),
        _steps(a.wo_a),
    )  # fmt: skip


def _steps(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def operands(o, wo_a, o_scale, wo_scale, o_global, wo_global, format, scale_layout, dtype, out) -> Operands:
    return Operands(o, wo_a, out)
