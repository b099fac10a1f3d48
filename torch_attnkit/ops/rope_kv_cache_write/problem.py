"""A call of rope_kv_cache_write as a problem of the kernels on cache rows."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.problem import Problem, RopeOperands, RopeProblem, Row


def problem(call: Call) -> RopeProblem:
    a, dim = call.arg, call.dim
    keys = Problem(
        Row(a.format, dim["D"], a.rope_dim if a.format != "none" else 0), call.device, a.kv.dtype, a.cache.dtype,
        a.slot.dtype, dim["Tq"], dim["Nc"], _steps(a.kv)[0], _steps(a.cache)[0], a.global_scale is not None,
    )  # fmt: skip
    return RopeProblem(keys, dim["Hq"], dim["R2"], a.cos.dtype, _steps(a.q), _steps(a.cos) + _steps(a.sin))


def _steps(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def operands(q, kv, cache, slot, cos, sin, global_scale, eps, format, rope_dim, q_out) -> RopeOperands:
    return RopeOperands(q, kv, cache, slot, cos, sin, global_scale, q_out, eps)
