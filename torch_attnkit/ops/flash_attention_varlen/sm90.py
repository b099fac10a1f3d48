"""flash_attention_varlen on Hopper: flash_attention's kernel over packed sequences, D 32 to 256, in bf16 and fp16.

    producer warp: finds the tile's sequence, TMA of Q, K, V  ->  2 or 3 consumer warpgroups  ->  stores from registers

The device code is ``cuda/sm90/prefill.py``. No offset is read on the host: the grid has room for every sequence's last,
partial tile, and the producer skips what stays empty. Rows of V that belong to the next sequence are cleared in shared
memory, for a weight of 0 must not meet what they hold.

TFLOP/s on one H200, bf16, 32/8 heads, 64 lengths of 1 to 4096, and the best peer's time over ours (FlashAttention-3):
D 128 causal 552 (1.03), full 591 (0.99); D 64 causal 413 (1.01), full 471 (0.99).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import prefill_launch
from torch_attnkit.cuda.sm90 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    D, Dv = call.dim["D"], call.dim["Dv"]

    def signature(scores: prefill_launch.Scores) -> dict[str, Any]:
        return prefill_plan.signature(call, prefill_plan.tiles(D, Dv, call.arg.causal, scores.window), scores)

    return prefill_launch.packed(call, target, signature)
