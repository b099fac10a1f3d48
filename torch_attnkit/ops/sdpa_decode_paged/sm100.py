"""sdpa_decode_paged on Blackwell: out = softmax(scale * q K') V over the visible keys of a paged cache, each read once.

The kernels are those of ``sdpa_decode``: ``cuda/sm100/decode.py`` for E4M3, for heads of 512 and for groups of more
than 8 query heads, and Hopper's ``cuda/decode.py`` for the rest. They have run in the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.cuda.decode_launch import decoder
from torch_attnkit.cuda.sm100.decode_plan import plan


def build(call: Call, target: Target) -> Callable[..., None]:
    run = decoder(call, target, plan, call.dim["Mp"] * call.dim["Ps"], call.dim["Ps"])

    def launch(q: Any, k: Any, v: Any, table: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        run(q, k, v, table, kv_len, sink, kv_start, rest)

    return launch
