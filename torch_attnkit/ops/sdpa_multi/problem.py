"""A call of sdpa_multi as a problem of the prefill kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.prefill.problem import Layout, Operands, Problem
from torch_attnkit.kernels.scores import Scores


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    return Problem(
        call.dtype, call.device, d["B"], d["T"], d["S"], d["Hq"], d["Hkv"], d["D"], d["Dv"],
        q=Layout.of(a.q),
        k=Layout.of(a.k_cache),
        v=Layout.of(a.v_cache),
        cached=True,
        longest=d["T"],
        kv_len=True,
        kv_start=a.kv_start is not None,
        scores=Scores.of(d["D"], a),
        causal=a.causal,
        sink=a.sink is not None,
        scales=(a.q_scale is not None, a.k_scale is not None, a.v_scale is not None),
    )  # fmt: skip


def operands(
    q, k_cache, v_cache, kv_len, sink, kv_start, q_scale, k_scale, v_scale,
    scale, causal, window, sink_tokens, softcap, out, lse,
) -> Operands:  # fmt: skip
    return Operands(
        q, k_cache, v_cache, sink, kv_len, kv_start, None, None, (q_scale, k_scale, v_scale), out, lse, None
    )
