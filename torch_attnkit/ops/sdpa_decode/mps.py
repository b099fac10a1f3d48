"""sdpa_decode on Metal: out = softmax(scale * q K') V over the visible keys, each key and value read once.

The kernel is ``attnkit/decode.h``: a threadgroup serves all query heads of a KV head for a share of its keys. Bound by
memory.
"""

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
        call.dtype, d["B"], 1, d["Hq"], d["Hkv"], d["D"], d["Dv"], d["S"],
        steps=(q[0], 0, q[1], k[0], k[1], k[2], v[0], v[1], v[2]),
    )  # fmt: skip
    run = decode.launcher(call.op, target, sizes, a)

    def launch(q: Any, k: Any, v: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        run((q, k, v, None, kv_len, sink, kv_start), *rest[-2:])

    return launch
