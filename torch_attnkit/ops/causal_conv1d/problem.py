"""A call of causal_conv1d as a problem of its kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.delta.problem import ConvOperands, ConvProblem


def problem(call: Call) -> ConvProblem:
    a, d = call.arg, call.dim
    return ConvProblem(
        device=call.device,
        dtype=a.x.dtype,
        tokens=d["Tq"],
        batch=d["B"],
        channels=d["C"],
        width=d["W"],
        columns=d["Ws"],
        slots=d["Ns"],
        bias=a.bias is not None,
        past=a.past is not None,
        silu=a.activation == "silu",
        steps=tuple(step for t in (a.x, a.weight, a.conv_state, a.cu_seqlens, a.state_index) for step in t.stride()),
        past_step=a.past.stride(0) if a.past is not None else 0,
        bias_step=a.bias.stride(0) if a.bias is not None else 0,
    )


def operands(x, weight, conv_state, cu_seqlens, state_index, bias, past, activation, out) -> ConvOperands:
    return ConvOperands(x, weight, conv_state, cu_seqlens, state_index, bias, past, out)
