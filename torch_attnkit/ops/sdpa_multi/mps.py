"""sdpa_multi on Metal: the queries of a block share what they read of K and V.

A short block is a problem of ``kernels/decode`` with more rows, which splits the keys over threadgroups; a long one
fills the machine with its rows, and is a problem of ``kernels/prefill``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.decode import metal as decode
from torch_attnkit.kernels.decode import problem as steps
from torch_attnkit.kernels.prefill import metal as prefill

from .problem import operands, problem

_MANY = 64  # rows of a KV head, its queries times its query heads, from which on tiles of 128 are mostly full


def build(call: Call, target: Target) -> Callable[..., None]:
    p = problem(call)
    if p.queries * p.heads > _MANY * p.kv_heads:
        fill = prefill.launcher(call.op, p, target, defines=dict(MANY=True))
        return lambda *arguments: fill(operands(*arguments))
    q, k, v = (layout.strides for layout in (p.q, p.k, p.v))
    few = steps.Problem(
        p.dtype, p.device, p.batch, p.heads, p.kv_heads, p.dim, p.dim_v, p.keys, p.scores,
        q=steps.Strides(q[0], q[1], q[2]),
        k=steps.Strides(k[0], k[2], k[1]),
        v=steps.Strides(v[0], v[2], v[1]),
        queries=p.queries, causal=p.causal, sink=p.sink, kv_start=p.kv_start, scales=p.scales,
        fp8_kv=p.dtype.itemsize == 1,
    )  # fmt: skip
    step = decode.launcher(call.op, few, target, defines=dict(MANY=False))

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        assert o.kv_len is not None
        step(steps.Operands(o.q, o.k, o.v, None, o.kv_len, o.sink, o.kv_start, o.scales, o.out, o.lse))

    return launch
