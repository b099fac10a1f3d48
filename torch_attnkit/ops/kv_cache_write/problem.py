"""A call of kv_cache_write as a problem of the kernels on cache rows."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.problem import Operands, Problem, Row


def problem(call: Call) -> Problem:
    a, dim = call.arg, call.dim
    return Problem(
        Row(a.format, dim["D"], a.rope_dim if a.format != "none" else 0), call.device, a.kv.dtype, a.cache.dtype,
        a.slot.dtype, dim["R"], dim["Nc"], a.kv.stride(0) if dim["R"] > 1 else 0,
        a.cache.stride(0) if dim["Nc"] > 1 else 0, a.global_scale is not None,
    )  # fmt: skip


def operands(kv, cache, slot, global_scale, format, rope_dim) -> Operands:
    return Operands(kv, cache, slot, global_scale)
