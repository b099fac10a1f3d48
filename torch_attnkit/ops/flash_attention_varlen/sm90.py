"""flash_attention_varlen on Hopper: flash_attention's kernel over packed sequences, D 32 to 256, in bf16 and fp16.

    producer warp: finds the tile's sequence, TMA of Q, K, V  ->  2 or 3 consumer warpgroups  ->  stores from registers

The device code is ``cuda/sm90/prefill.py``. No offset is read on the host: the grid has room for every sequence's last,
partial tile, and the producer skips what stays empty. Rows of V that belong to the next sequence are cleared in shared
memory, for a weight of 0 must not meet what they hold.

TFLOP/s on one H200, bf16, 32/8 heads, 64 lengths of 1 to 4096, and the best peer's time over ours (FlashAttention-3):
D 128 causal 561 (1.04), full 615 (1.00); D 64 causal 424 (1.02), full 485 (1.00). Measured before all consumers came to
share the clearing of V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.sm90 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    Tq, Tk, Hq, Hkv, D, Dv = (call.dim[axis] for axis in ("Tq", "Tk", "Hq", "Hkv", "D", "Dv"))
    a, normalize = call.arg, call.arg.normalize
    longest = max(Tq, Tk)  # of one sequence, if nothing else is known
    scores = prefill_plan.Scores(D, a.scale, a.softcap, -1 if a.window >= longest else a.window, a.sink_tokens)
    tiles = prefill_plan.tiles(D, Dv, a.causal, scores.window)
    run: Any = compile.launcher(call, target, "sm90", **prefill_plan.signature(call, tiles, scores))
    read_q, read_k, read_v = (prefill_plan.reader(t) for t in (a.q, a.k, a.v))
    # One CTA per tile, which the hardware would balance, was 3 to 10 % slower on 64 lengths of 1 to 4096.
    scalars = scores.scalars(1, driver.sm_count(call.device))

    def launch(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, *rest):
        out, lse, row_sum = rest[-3:]
        if min(Tq, Hq) == 0:
            return
        if Tk == 0:
            return prefill_plan.nothing_attended(out, lse, row_sum)
        q = read_q(q.neg() if scores.negate else q)
        ins = (q, read_k(k), read_v(v), sink, cu_seqlens_q, cu_seqlens_k)
        run(ins, (out, lse, None if normalize else row_sum), scalars)

    return launch
