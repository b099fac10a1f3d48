"""sdpa_multi on Metal: the queries of a block share what they read of K and V.

A short block is sdpa_decode's kernel with more rows, which splits the keys over threadgroups; a long one fills the
machine with its rows, and is flash_attention's kernel with positions that count from the length of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import decode, prefill

_MANY = 64  # rows of a KV head, its queries times its query heads, from which on tiles of 128 are mostly full


def build(call: Call, target: Target) -> Callable[..., None]:
    a, d = call.arg, call.dim
    if d["B"] * d["T"] * d["Dv"] * d["Hq"] == 0:
        return lambda *args: None
    steps = (*a.q.stride()[:3], *a.k_cache.stride()[:3], *a.v_cache.stride()[:3])
    many = d["T"] * d["Hq"] > _MANY * d["Hkv"]
    if many:
        tiles = prefill.Sizes(
            call.dtype, d["B"], d["T"], d["S"], d["Hq"], d["Hkv"], d["D"], d["Dv"], steps, d["T"], in_cache=True
        )
        fill = prefill.launcher(call.op, target, tiles, a, defines=dict(MANY=True))
    else:
        rows = decode.Sizes(call.dtype, d["B"], d["T"], d["Hq"], d["Hkv"], d["D"], d["Dv"], d["S"], steps)
        step = decode.launcher(call.op, target, rows, a, causal=a.causal, defines=dict(MANY=False))

    def launch(q: Any, k: Any, v: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        if many:
            fill((q, k, v, sink, kv_len, kv_start), (*rest[-2:], None))
        else:
            step((q, k, v, None, kv_len, sink, kv_start), *rest[-2:])

    return launch
