"""A call of gated_delta_step as a problem of the kernels of the gated delta rule."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.delta.launch import VECTOR
from torch_attnkit.kernels.delta.problem import StepOperands, StepProblem


def problem(call: Call) -> StepProblem:
    a, d = call.arg, call.dim
    return StepProblem(
        device=call.device,
        dtype=a.v.dtype,
        gate_dtypes=(a.A_log.dtype, a.dt_bias.dtype),
        batch=d["B"],
        tokens=d["n"],
        heads=d["Hv"],
        key_heads=d["Hk"],
        dims=(d["K"], d["V"]),
        scale=d["K"] ** -0.5 if a.scale is None else a.scale,
        normalized=a.qk_l2norm,
        eps=a.eps,
        beta_scale=a.beta_scale,
        accepted=a.accepted is not None,
        slots=d["Ns"],
        steps=tuple(
            step
            for t, axes in ((a.q, 3), (a.k, 3), (a.v, 3), (a.a, 3), (a.b, 3), (a.state, 3), (a.state_index, 2))
            for step in t.stride()[:axes]
        ),
        aligned=all(step % VECTOR == 0 for t in (a.q, a.k) for step in t.stride()[:-1]),
        state_aligned=all(step % VECTOR == 0 for step in a.state.stride()[:-1]),
    )


def operands(
    q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, scale, qk_l2norm, eps, beta_scale, out
) -> StepOperands:
    return StepOperands(q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, out)
