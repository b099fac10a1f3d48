"""flash_attention on Blackwell: softmax(scale Q K') V for T queries over S keys, D 32 to 256, in bf16 and fp16.

    loads: TMA of Q, K, V  ->  products: tcgen05, S, P and O in tensor memory  ->  softmax, correction  ->  stores

The device code is ``cuda/sm100/prefill.py``, its tiles stand in ``cuda/sm100/prefill_plan.py``. It has run in the PTX
simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.sm90 import prefill_plan as shared
from torch_attnkit.cuda.sm100 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    B, T, S, Hq, Hkv, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "Hkv", "D", "Dv"))
    a, normalize = call.arg, call.arg.normalize
    window = -1 if a.window >= (S if a.causal else max(S, T)) else a.window
    scores = shared.Scores(D, a.scale, a.softcap, window, a.sink_tokens)
    signature = prefill_plan.signature(call, T, scores)
    run: Any = compile.launcher(
        call, target, "sm100", kv_len=a.kv_len is not None, kv_start=a.kv_start is not None, **signature
    )
    read_q, read_k, read_v = (shared.reader(t) for t in (a.q, a.k, a.v))
    section = shared.section(S, (D + Dv) * call.dtype.itemsize, max(1, Hq // Hkv // signature["group"]))
    scalars = scores.scalars(section, driver.sm_count(call.device))

    def launch(q, k, v, sink, kv_len, kv_start, *rest):
        out, lse, row_sum = rest[-3:]
        if min(B, T, Hq) == 0:
            return
        if S == 0:
            return shared.nothing_attended(out, lse, row_sum)
        q = read_q(q.neg() if scores.negate else q)
        ins = (q, read_k(k), read_v(v), sink, kv_start, kv_len)
        run(ins, (out, lse, None if normalize else row_sum), scalars)

    return launch
