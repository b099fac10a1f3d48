"""sdpa_decode on Blackwell: out = softmax(scale * q K') V over the visible keys, each key and value read once.

The kernels are ``cuda/sm100/decode.py`` for E4M3, for heads of 512 and for groups of more than 8 query heads, which
reads the keys once for 128 of them, and Hopper's ``cuda/decode.py`` for fewer and for head dims other than 64, 128 and
256; that one reads keys again for every 8 heads. They have run in the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.cuda.decode_launch import decoder
from torch_attnkit.cuda.sm100.decode_plan import plan


def build(call: Call, target: Target) -> Callable[..., None]:
    run = decoder(call, target, plan, call.dim["S"])

    def launch(q: Any, k: Any, v: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        run(q, k, v, None, kv_len, sink, kv_start, rest)

    return launch
