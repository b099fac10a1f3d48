"""A call of sdpa_decode_paged as a problem of the decode kernels."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.decode.problem import Operands, Problem, Strides
from torch_attnkit.kernels.scores import Scores


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    q, k, v = a.q.stride(), a.k_cache.stride(), a.v_cache.stride()
    return Problem(
        call.dtype, call.device, d["B"], d["Hq"], d["Hkv"], d["D"], d["Dv"],
        capacity=d["Mp"] * d["Ps"],
        scores=Scores.of(d["D"], a),
        q=Strides(q[0], 0, q[1]),
        k=Strides(k[0], k[1], k[2]),
        v=Strides(v[0], v[1], v[2]),
        page=d["Ps"],
        pages=d["Np"],
        table_row=a.block_table.stride(0),
        sink=a.sink is not None,
        kv_start=a.kv_start is not None,
        scales=(a.q_scale is not None, a.k_scale is not None, a.v_scale is not None),
        fp8_kv=a.k_cache.dtype.itemsize == 1,
    )  # fmt: skip


def operands(
    q, k_cache, v_cache, block_table, kv_len, sink, kv_start, q_scale, k_scale, v_scale,
    scale, window, sink_tokens, softcap, out, lse,
) -> Operands:  # fmt: skip
    return Operands(q, k_cache, v_cache, block_table, kv_len, sink, kv_start, (q_scale, k_scale, v_scale), out, lse)
