"""A call of rope_kv_cache_append as a problem of the kernels on caches."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.append import AppendOperands, AppendProblem


def problem(call: Call) -> AppendProblem:
    a, d = call.arg, call.dim
    return AppendProblem(
        device=call.device,
        dtype=a.key.dtype,
        angle_dtype=a.cos.dtype,
        slot_dtype=None if a.slot is None else a.slot.dtype,
        sink_dtype=None if a.sink is None else a.sink.dtype,
        batch=d["B"],
        heads=d["Hq"],
        kv_heads=d["Hkv"],
        rows=d["S"],
        dims=(d["D"], d["Dv"]),
        pairs=d["R2"],
        steps=tuple(step for t in (a.q, a.key, a.value, a.k_cache, a.v_cache) for step in _steps(t)),
        angle_steps=_steps(a.cos)[:1] + _steps(a.sin)[:1],
        shared=(d["Ba"] == 1, a.slot is None or a.slot.shape[0] == 1),
    )


def _steps(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def operands(q, key, value, k_cache, v_cache, cos, sin, slot, sink, q_out, sink_out) -> AppendOperands:
    return AppendOperands(q, key, value, k_cache, v_cache, cos, sin, slot, sink, q_out, sink_out)
