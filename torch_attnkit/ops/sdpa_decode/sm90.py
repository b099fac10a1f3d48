"""sdpa_decode on Hopper: out = softmax(scale * q K') V over the visible keys, each key and value read once.

The kernels are ``cuda/decode.py``, for many heads or long caches ``cuda/sm90/decode_wide.py``, and for latent vectors
that are keys and values ``cuda/sm90/decode_latent.py``: a grid that fills the SMs cuts the tiles of all sequences into
equal shares by the lengths on the device, so ragged batches are as fast as equal ones. Bound by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.target import Target
from torch_attnkit.cuda.decode_launch import decoder
from torch_attnkit.cuda.decode_plan import plan


def build(call: Call, target: Target) -> Callable[..., None]:
    run = decoder(call, target, plan, call.dim["S"])

    def launch(q: Any, k: Any, v: Any, kv_len: Any, sink: Any, kv_start: Any, *rest: Any) -> None:
        run(q, k, v, None, kv_len, sink, kv_start, rest)

    return launch
