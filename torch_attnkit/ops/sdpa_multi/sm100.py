"""sdpa_multi on Blackwell: out = softmax(scale * q K') V for a block of queries, K and V read once per KV head.

The device code is flash_attention's, ``cuda/sm100/prefill.py`` and for D 512 ``cuda/sm100/prefill_wide.py``: the query
heads of a KV head and the queries of a block are the rows of its tiles, and a sequence's queries end where its keys do.
They have run in the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import compile, driver, prefill_launch
from torch_attnkit.cuda.sm100 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    B, T, S, Hq, Hkv, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "Hkv", "D", "Dv"))
    a = call.arg
    scores = prefill_launch.Scores(D, a.scale, a.softcap, a.window, a.sink_tokens)
    signature = prefill_plan.signature(call, T, scores)
    run: Any = compile.launcher(call, target, "sm100", kv_start=a.kv_start is not None, **signature)
    read_q = prefill_launch.reader(a.q)
    read_k, read_v = (prefill_launch.reader(t.transpose(1, 2)) for t in (a.k_cache, a.v_cache))  # (B, S, Hkv, D)
    section = prefill_launch.section(S, (D + Dv) * call.dtype.itemsize, max(1, Hq // Hkv // signature["group"]))
    scalars = scores.scalars(section, driver.sm_count(call.device))

    def launch(q, k, v, kv_len, sink, kv_start, *rest):
        out, lse = rest[-2:]
        if min(B, T, Hq) == 0:
            return
        if S == 0:
            out.zero_()
            lse.fill_(-torch.inf)
            return
        q = read_q(q.neg() if scores.negate else q)
        ins = (q, read_k(k.transpose(1, 2)), read_v(v.transpose(1, 2)), sink, kv_start, kv_len)
        run(ins, (out, lse, None), scalars)

    return launch
