"""flash_attention on Hopper: softmax(scale Q K') V for T queries over S keys, D 32 to 256, in bf16 and fp16.

    producer warp: TMA of Q, K, V  ->  2 or 3 consumer warpgroups: wgmma, softmax, wgmma  ->  stores from registers

The device code is ``cuda/sm90/prefill.py``, its tiles stand in ``cuda/sm90/prefill_plan.py``. D 128 and above is bound
by the tensor cores and, after some milliseconds, by the power limit; D 64 and below by the exponentials.

TFLOP/s on one H200 (bf16, 32/8 heads, D 128; torch 2.11), and the best peer's time over ours (of cuDNN,
FlashAttention-3 and -4), from ``bench/baselines/nvidia-h200.json``:
    causal         8 x 2048 561 (1.10)   4 x 4096 624 (1.05)   2 x 8192 665 (1.01)   1 x 16384 660 (0.96)
    full           8 x 2048 633 (1.03)   4 x 4096 669 (1.01)   2 x 8192 655 (0.99)   1 x 16384 660 (0.99)
    causal         D 64 457 (0.98)   D 96 526 (0.97)   D 192 624 (1.02), all 4 x 4096   D 256, 2 x 8192 776 (1.02)
    full           D 64 512 (0.98)   D 96 585 (0.96)   D 192 673 (1.03), all 4 x 4096   D 256, 2 x 8192 744 (0.99)
Window 1024, 2 x 8192 517 (1.09); with sinks, 64/8 heads, D 64, 4 x 4096, window 128 236 us (1.00), causal 448 (0.97).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import prefill_launch
from torch_attnkit.cuda.sm90 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    D, Dv, group = call.dim["D"], call.dim["Dv"], call.dim["Hq"] // call.dim["Hkv"]

    def signature(scores: prefill_launch.Scores) -> dict[str, Any]:
        return prefill_plan.signature(call, prefill_plan.tiles(D, Dv, call.arg.causal, scores.window), scores)

    return prefill_launch.dense(call, target, signature, lambda s: group // (2 if s["pair"] else 1))
