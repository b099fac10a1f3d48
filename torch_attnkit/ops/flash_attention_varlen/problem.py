"""A call of flash_attention_varlen as a problem of the prefill kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.prefill.problem import Layout, Operands, Problem
from torch_attnkit.kernels.scores import Scores


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    return Problem(
        call.dtype, call.device, d["B"], d["Tq"], d["Tk"], d["Hq"], d["Hkv"], d["D"], d["Dv"],
        q=Layout.of(a.q),
        k=Layout.of(a.k),
        v=Layout.of(a.v),
        normalize=a.normalize,
        packed=True,
        longest=min(a.max_seqlen_q, d["Tq"]) if a.max_seqlen_q >= 0 else d["Tq"],
        scores=Scores.of(d["D"], a),
        causal=a.causal,
        sink=a.sink is not None,
        scales=(a.q_scale is not None, a.k_scale is not None, a.v_scale is not None),
    )  # fmt: skip


def operands(
    q, k, v, cu_seqlens_q, cu_seqlens_k, sink, q_scale, k_scale, v_scale,
    scale, causal, window, sink_tokens, softcap, normalize, max_seqlen_q, max_seqlen_k, out, lse, row_sum,
) -> Operands:  # fmt: skip
    return Operands(
        q, k, v, sink, None, None, cu_seqlens_q, cu_seqlens_k, (q_scale, k_scale, v_scale), out, lse, row_sum
    )
