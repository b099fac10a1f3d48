"""A call of kimi_delta_step as a problem of the kernels of the gated delta rule."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.delta.problem import StepOperands, StepProblem
from torch_attnkit.ops.gated_delta_step.problem import step_problem


def problem(call: Call) -> StepProblem:
    return step_problem(call, call.dim["Hv"], 1.0, channels=True, lower_bound=call.arg.lower_bound)


def operands(
    q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, scale, qk_l2norm, eps, lower_bound, out
) -> StepOperands:
    return StepOperands(q, k, v, a, b, A_log, dt_bias, state, state_index, accepted, out)
