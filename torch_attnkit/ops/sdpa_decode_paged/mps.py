"""sdpa_decode_paged on Metal: sdpa_decode's kernel, whose lanes look the pages of the next keys up for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import decode


def build(call: Call, target: Target) -> Callable[..., None]:
    a, d = call.arg, call.dim
    if d["B"] * d["Dv"] * d["Hq"] == 0:
        return lambda *args: None
    q, k, v = a.q.stride(), a.k_cache.stride(), a.v_cache.stride()
    sizes = decode.Sizes(
        call.dtype, d["B"], 1, d["Hq"], d["Hkv"], d["D"], d["Dv"], d["Mp"] * d["Ps"] if d["Np"] else 0,
        steps=(q[0], 0, q[1], k[0], k[2], k[1], v[0], v[2], v[1]),
        page=d["Ps"], pages=d["Np"], table_row=a.block_table.stride(0),
    )  # fmt: skip
    run = decode.launcher(call.op, target, sizes, a)

    def launch(q: Any, k: Any, v: Any, table: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        run((q, k, v, table, kv_len, sink, kv_start), *rest[-2:])

    return launch
