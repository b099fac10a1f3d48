"""flash_attention_varlen on Metal: flash_attention's kernel, whose threadgroups find their sequence by the offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import prefill


def build(call: Call, target: Target) -> Callable[..., None]:
    a, d = call.arg, call.dim
    if d["Tq"] * d["Hq"] * d["Dv"] == 0:
        return lambda *args: None
    q, k, v = a.q.stride(), a.k.stride(), a.v.stride()
    sizes = prefill.Sizes(
        call.dtype, d["B"], d["Tq"], d["Tk"], d["Hq"], d["Hkv"], d["D"], d["Dv"],
        steps=(0, q[0], q[1], 0, k[1], k[0], 0, v[1], v[0]), varlen=True,
        longest=min(a.max_seqlen_q, d["Tq"]) if a.max_seqlen_q >= 0 else d["Tq"],
    )  # fmt: skip
    run = prefill.launcher(call.op, target, sizes, a, normalize=a.normalize)

    def launch(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, sink: Any, *rest: Any) -> None:
        run((q, k, v, sink, cu_q, cu_k), rest[-3:])

    return launch
