"""A call of gated_delta_rule as a problem of the kernels of the gated delta rule."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.delta.problem import RuleOperands, RuleProblem


def problem(call: Call) -> RuleProblem:
    a, d = call.arg, call.dim
    return RuleProblem(
        device=call.device,
        dtype=a.v.dtype,
        beta_dtype=a.beta.dtype,
        tokens=d["Tq"],
        batch=d["B"],
        heads=d["Hv"],
        key_heads=d["Hk"],
        dims=(d["K"], d["V"]),
        scale=d["K"] ** -0.5 if a.scale is None else a.scale,
        normalized=a.qk_l2norm,
        eps=a.eps,
        past=a.past is not None,
        slots=d["Ns"],
        steps=tuple(step for t in (a.q, a.k, a.v) for step in t.stride()[:-1]),
        state_steps=a.state.stride()[:-1],
        small_steps=tuple(
            step
            for t in (a.g, a.beta, a.cu_seqlens, a.state_index, a.state_index if a.past is None else a.past)
            for step in t.stride()
        ),
    )


def operands(q, k, v, g, beta, state, cu_seqlens, state_index, past, scale, qk_l2norm, eps, out) -> RuleOperands:
    return RuleOperands(q, k, v, g, beta, state, cu_seqlens, state_index, past, out)
