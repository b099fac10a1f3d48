"""flash_attention_varlen on Blackwell: flash_attention's kernel over packed sequences, D 32 to 256, in bf16 and fp16.

The device code is ``cuda/sm100/prefill.py``. The loading warp finds every tile's sequence on the device, and the
correction warps clear rows of V that belong to the next one. It has run in the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.sm90 import prefill_plan as shared
from torch_attnkit.cuda.sm100 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    Tq, Tk, Hq, D = (call.dim[axis] for axis in ("Tq", "Tk", "Hq", "D"))
    a, normalize = call.arg, call.arg.normalize
    longest = max(Tq, Tk)  # of one sequence, if nothing else is known
    scores = shared.Scores(D, a.scale, a.softcap, -1 if a.window >= longest else a.window, a.sink_tokens)
    run: Any = compile.launcher(call, target, "sm100", **prefill_plan.signature(call, Tq, scores))
    read_q, read_k, read_v = (shared.reader(t) for t in (a.q, a.k, a.v))
    scalars = scores.scalars(1, driver.sm_count(call.device))

    def launch(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, *rest):
        out, lse, row_sum = rest[-3:]
        if min(Tq, Hq) == 0:
            return
        if Tk == 0:
            return shared.nothing_attended(out, lse, row_sum)
        q = read_q(q.neg() if scores.negate else q)
        ins = (q, read_k(k), read_v(v), sink, cu_seqlens_q, cu_seqlens_k)
        run(ins, (out, lse, None if normalize else row_sum), scalars)

    return launch
