"""flash_attention on Hopper: softmax(scale Q K') V for T queries over S keys, D 32 to 256, in bf16 and fp16.

    producer warp: TMA of Q, K, V  ->  2 or 3 consumer warpgroups: wgmma, softmax, wgmma  ->  stores from registers

The device code is ``cuda/sm90/prefill.py``, its tiles stand in ``cuda/sm90/prefill_plan.py``. D 128 and above is bound
by the tensor cores and, after some milliseconds, by the power limit; D 64 and below by the exponentials.

TFLOP/s on one H200 (bf16, 32/8 heads, D 128; torch 2.11), and the best peer's time over ours (of cuDNN,
FlashAttention-3 and -4), from ``bench/baselines/nvidia-h200.json``:
    causal         8 x 2048 577 (1.09)   4 x 4096 652 (1.07)
    full           8 x 2048 662 (1.06)   4 x 4096 682 (1.00)
    4 x 4096       D 64 causal 470 (0.98), full 522 (0.97)   D 96 536 (0.96), 549 (0.86)   D 192 643 (1.01), 676 (1.00)
    windows        1024: 486 us (1.10)   128 with sinks, 64/8 heads, D 64: 239 us (0.99)
They are of the kernel before its factor for the row sums became exact, which the LSE of 8192 tokens and more needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.sm90 import prefill_plan


def _window(call: Call) -> int:
    """The window, or -1 if it hides nothing."""
    T, S, window = call.dim["T"], call.dim["S"], call.arg.window
    return -1 if window >= (S if call.arg.causal else max(S, T)) else window


def build(call: Call, target: Target) -> Callable[..., None]:
    B, T, S, Hq, Hkv, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "Hkv", "D", "Dv"))
    a, normalize = call.arg, call.arg.normalize
    scores = prefill_plan.Scores(D, a.scale, a.softcap, _window(call), a.sink_tokens)
    tiles = prefill_plan.tiles(D, Dv, a.causal, scores.window)
    run: Any = compile.launcher(
        call,
        target,
        "sm90",
        kv_len=a.kv_len is not None,
        kv_start=a.kv_start is not None,
        **prefill_plan.signature(call, tiles, scores),
    )
    read_q, read_k, read_v = (prefill_plan.reader(t) for t in (a.q, a.k, a.v))
    ctas = 2 if tiles.paired(Hq // Hkv) else 1
    section = prefill_plan.section(S, (D + Dv) * call.dtype.itemsize, Hq // Hkv // ctas)
    scalars = scores.scalars(section, driver.sm_count(call.device))

    def launch(q, k, v, sink, kv_len, kv_start, *rest):
        out, lse, row_sum = rest[-3:]
        if min(B, T, Hq) == 0:
            return
        if S == 0:
            return prefill_plan.nothing_attended(out, lse, row_sum)
        q = read_q(q.neg() if scores.negate else q)
        ins = (q, read_k(k), read_v(v), sink, kv_start, kv_len)
        run(ins, (out, lse, None if normalize else row_sum), scalars)

    return launch
