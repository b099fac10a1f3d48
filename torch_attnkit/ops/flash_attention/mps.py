"""flash_attention on Metal: out = softmax(scale * q K') V, in tiles of up to 128 rows that share K and V.

The kernel is ``attnkit/prefill.h``: 8x8 matrix products and softmax in float, query heads of a KV head in one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.mps import prefill


def build(call: Call, target: Target) -> Callable[..., None]:
    a, d = call.arg, call.dim
    if d["B"] * d["T"] * d["Hq"] * d["Dv"] == 0:
        return lambda *args: None
    q, k, v = a.q.stride(), a.k.stride(), a.v.stride()
    sizes = prefill.Sizes(
        call.dtype, d["B"], d["T"], d["S"], d["Hq"], d["Hkv"], d["D"], d["Dv"],
        steps=(q[0], q[1], q[2], k[0], k[2], k[1], v[0], v[2], v[1]), longest=d["T"],
    )  # fmt: skip
    run = prefill.launcher(call.op, target, sizes, a, normalize=a.normalize)

    def launch(*args: Any) -> None:
        run(args[:6], args[-3:])

    return launch
