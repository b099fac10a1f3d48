"""sdpa_multi on Hopper: out = softmax(scale * q K') V for a block of queries, K and V read once per KV head.

The kernel is ``cuda/sm90/multi.py``, its tiles and clusters are chosen in ``cuda/sm90/multi_plan.py``: all query heads
of a KV head are rows of one tile, and where tiles alone do not fill the machine, a cluster shares the keys of a tile
and merges inside the launch. Bound by memory up to 128 rows a KV head, then by the tensor cores and their power.
Clusters are chosen for full caches: a batch of unequal lengths takes about as long as one of its longest.

Microseconds on one H200 (bf16, 32/8 heads, D 128, 8192 keys past the L2, torch 2.11, graphs of all contenders in turn);
in brackets FlashAttention-3 with its own splits, FlashAttention-4 and cuDNN, which takes no causal block at the end:
    queries      B 1                      B 4                     B 16
    16 full      15.9 (19.7, 87.5, 99.6)  39.1 (-, 88.3, 101.7)   124.9 (133.0, 125.9, 437)
    16 causal    15.9 (20.3, 88.0)        39.4 (43.7, 90.2)       125.0 (132.9, 125.8)
    32 causal                                                     129.9 (145.9, 127.6)
    64 full      25.5 (28.6, 87.7, 99.4)  59.7 (-, 88.4, 103.0)   216.5 (256.9, 209.0, 450)
    64 causal    25.4 (29.2, 88.5)        63.7 (75.1, 102.0)      222.2 (255.6, 218.1)
At B 16, 16 queries move 4.30 TB/s, and 64 queries run into the power limit: 203 us with pauses, FlashAttention-4 202.
B 1 and B 4 were timed with a last meeting of the cluster that ordered less; with one as it is now, and a slower start
of the kernel, B 1 took 16.0 and 27.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver, prefill_launch
from torch_attnkit.cuda.sm90 import multi_plan


def _scalars(call: Call, scores: prefill_launch.Scores, ctas: int) -> tuple[Any, ...]:
    """The kernel's Scalars."""
    a = call.arg
    scale_log2, cap_slope = scores.scalars(0, 0)[:2]
    window, sinks = (a.window, a.sink_tokens) if a.window >= 0 else (prefill_launch.MOST, 0)
    return (
        scale_log2,
        cap_slope,
        min(window, prefill_launch.MOST),
        min(sinks, prefill_launch.MOST),
        int(a.causal),
        int(a.sink is not None),
        int(a.kv_start is not None),
        ctas,
    )


def build(call: Call, target: Target) -> Callable[..., None]:
    a, dim = call.arg, call.dim
    B, T, S, Hq, Hkv, D, Dv = (dim[axis] for axis in ("B", "T", "S", "Hq", "Hkv", "D", "Dv"))
    if B * T * Hq == 0:
        return lambda *args: None
    scores = prefill_launch.Scores(D, a.scale, a.softcap, a.window, a.sink_tokens)
    seen = S if a.window < 0 else min(S, a.window + T + a.sink_tokens)
    plan = multi_plan.plan(D, Dv, T * (Hq // Hkv), B * Hkv, seen, driver.sm_count(call.device))
    run: Any = compile.launcher(
        call, target, "sm90", dtype=short(call.dtype), dim=D, dim_v=Dv, softcap=a.softcap > 0, **plan.tiles._asdict()
    )
    read_q = prefill_launch.query_reader(a.q, scores.sign)
    read_k, read_v = (prefill_launch.reader(t) for t in (a.k_cache, a.v_cache))
    scalars = _scalars(call, scores, plan.ctas)
    unread = torch.empty(1, dtype=torch.float32, device=call.device)

    def launch(q, k, v, kv_len, sink, kv_start, *rest):
        out, lse = rest[-2:]
        if S == 0:
            out.zero_()
            lse.fill_(-torch.inf)
            return
        ins = (
            read_q(q),
            read_k(k),
            read_v(v),
            kv_len,
            unread if sink is None else sink,
            kv_len if kv_start is None else kv_start,
        )
        run(ins, (out, lse), scalars)

    return launch
