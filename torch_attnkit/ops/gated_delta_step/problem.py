"""A call of gated_delta_step as a problem of the kernels of the gated delta rule."""

from __future__ import annotations

from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.delta.problem import VECTOR, StepOperands, StepProblem


def problem(call: Call) -> StepProblem:
    return step_problem(call, call.dim["Hk"], call.arg.beta_scale)


def step_problem(call: Call, key_heads: int, beta_scale: float, **of_channels: Any) -> StepProblem:
    """A call of an op that is such a step; ``of_channels``: ``channels`` and ``lower_bound``."""
    a, d = call.arg, call.dim
    axes = (a.q, 3), (a.k, 3), (a.v, 3), (a.a, a.a.dim()), (a.b, 3), (a.state, 3), (a.state_index, 2)
    return StepProblem(
        device=call.device,
        dtype=a.v.dtype,
        gate_dtypes=(a.A_log.dtype, a.dt_bias.dtype),
        batch=d["B"],
        tokens=d["n"],
        heads=d["Hv"],
        key_heads=key_heads,
        dims=(d["K"], d["V"]),
        scale=d["K"] ** -0.5 if a.scale is None else a.scale,
        normalized=a.qk_l2norm,
        eps=a.eps,
        beta_scale=beta_scale,
        accepted=a.accepted is not None,
        slots=d["Ns"],
        steps=tuple(step for t, count in axes for step in t.stride()[:count]),
        aligned=all(step % VECTOR == 0 for t in (a.q, a.k) for step in t.stride()[:-1]),
        state_aligned=all(step % VECTOR == 0 for step in a.state.stride()[:-1]),
        **of_channels,
    )


def operands(
    q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, scale, qk_l2norm, eps, beta_scale, out
) -> StepOperands:
    return StepOperands(q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, out)
