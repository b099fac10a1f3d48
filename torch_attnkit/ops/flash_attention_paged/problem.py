"""A call of flash_attention_paged as a problem of the prefill kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.prefill import problem as blocks
from torch_attnkit.kernels.prefill.problem import PagedOperands, PagedProblem
from torch_attnkit.kernels.scores import Scores


def problem(call: Call) -> PagedProblem:
    a, d = call.arg, call.dim
    most = d["Mp"] * d["Ps"]
    attention = blocks.Problem(
        call.dtype, call.device, d["B"], d["Tq"], most, d["Hq"], d["Hkv"], d["D"], d["Dv"],
        q=blocks.Layout.of(a.q),
        k=blocks.Layout.of(a.k_cache),
        v=blocks.Layout.of(a.v_cache),
        packed=True,
        cached=True,
        longest=min(a.max_seqlen_q, d["Tq"]) if a.max_seqlen_q >= 0 else d["Tq"],
        kv_len=True,
        scores=Scores.of(d["D"], a),
        causal=a.causal,
        sink=a.sink is not None,
        scales=(a.q_scale is not None, a.k_scale is not None, a.v_scale is not None),
        fp8_kv=a.k_cache.dtype.itemsize == 1 < call.dtype.itemsize,
    )  # fmt: skip
    longest = min(a.max_seqlen_k, most) if a.max_seqlen_k >= 0 else most
    return PagedProblem(attention, d["Ps"], d["Np"], longest)


def operands(
    q, k_cache, v_cache, cu_seqlens_q, block_table, kv_len, sink, q_scale, k_scale, v_scale,
    scale, causal, window, sink_tokens, softcap, max_seqlen_q, max_seqlen_k, out, lse,
) -> PagedOperands:  # fmt: skip
    scales = (q_scale, k_scale, v_scale)
    return PagedOperands(q, k_cache, v_cache, cu_seqlens_q, block_table, kv_len, sink, out, lse, scales)
