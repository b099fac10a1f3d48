"""A call of grouped_output_projection as a problem of the products of groups."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.batched_gemm.problem import Fp4Problem, Operands, Problem


def problem(call: Call) -> Problem | Fp4Problem:
    a, dim = call.arg, call.dim
    if a.format != "none":
        return Fp4Problem(
            call.device, a.format, a.scale_layout, (a.o_global is not None, a.wo_global is not None),
            a.dtype or torch.float32, dim["Tq"], dim["G"], 2 * dim["Ko"], dim["R"], _steps(a.o), _steps(a.wo_a),
            _steps(a.wo_scale),
        )  # fmt: skip
    return Problem(
        call.device, a.o.dtype, a.dtype or a.o.dtype, dim["Tq"], dim["G"], dim["Ko"], dim["R"], _steps(a.o),
        _steps(a.wo_a),
    )  # fmt: skip


def _steps(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def operands(o, wo_a, o_scale, wo_scale, o_global, wo_global, format, scale_layout, dtype, out) -> Operands:
    return Operands(o, wo_a, out, o_scale, wo_scale, o_global, wo_global)
