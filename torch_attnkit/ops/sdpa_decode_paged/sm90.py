"""sdpa_decode_paged on Hopper: out = softmax(scale * q K') V over the visible keys of a paged cache, each read once.

The kernel is ``cuda/sm90/decode.py``: a grid of two blocks per SM, which cut the tiles of all sequences into equal
shares by the lengths on the device, so ragged batches are as fast as equal ones. Bound by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.decode_plan import bounded, plan, score_factors
from torch_attnkit.cuda.splits import Workspace


def build(call: Call, target: Target) -> Callable[..., None]:
    dim, dim_v = call.dim["D"], call.dim["Dv"]
    window, sinks = bounded(call.arg.window), bounded(call.arg.sink_tokens)
    size = call.dim["Mp"] * call.dim["Ps"]
    most = min(size, window + sinks) if window >= 0 else size
    heads, groups = call.dim["Hkv"], call.dim["B"] * call.dim["Hkv"]
    p = plan(dim, dim_v, call.dim["Hq"] // heads, driver.sm_count(call.device), most, groups, paged=True)
    if call.dim["B"] == 0:
        return lambda *args: None
    fn = compile.launcher(
        call, target, "sm90", dtype=short(call.dtype), dim=dim, dim_v=dim_v, page=call.dim["Ps"],
        heads=p.heads, keys=p.keys, warps=p.warps, stages=p.stages,
    )  # fmt: skip
    workspace = Workspace(call.device, p.floats, p.counters)
    product, power = score_factors(dim, call.arg.scale, call.arg.softcap)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, kv_len: torch.Tensor,
        sink: torch.Tensor | None, kv_start: torch.Tensor | None, *rest: Any,
    ) -> None:  # fmt: skip
        parts, count = workspace.get()
        has_sink, has_start = sink is not None, kv_start is not None
        fn(
            (q, k, v, table, kv_len, sink if has_sink else parts, kv_start if has_start else kv_len,
             *rest[4:], parts, count),
            (product, power, window, sinks, int(has_sink), int(has_start), p.chunks, p.by_group, p.least),
            p.blocks,
        )  # fmt: skip

    return launch
