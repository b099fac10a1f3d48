"""flash_attention on Blackwell: softmax(scale Q K') V for T queries over S keys, in bf16, fp16 and E4M3.

    loads: TMA of Q, K, V  ->  products: tcgen05, S, P and O in tensor memory  ->  softmax, correction  ->  stores

D 32 to 256 is ``cuda/sm100/prefill.py``. D 512 is ``cuda/sm100/prefill_wide.py``, where a pair of CTAs computes a tile
and P passes through shared memory. Either is one launch for any number of keys; their tiles stand in
``cuda/sm100/prefill_plan.py``. They have run in the PTX simulator only.

On E4M3 the products are ``kind::f8f6f4``, P is rounded to E4M3 too, and the scales of a tile's sequence and KV head,
read on the device, join the factors of scores and output: half of bf16's bytes for the same operations.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import prefill_launch
from torch_attnkit.cuda.sm100 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    group = call.dim["Hq"] // max(1, call.dim["Hkv"])
    return prefill_launch.dense(
        call,
        target,
        lambda scores: prefill_plan.signature(call, call.dim["T"], scores),
        lambda signature: max(1, group // signature["group"]),
    )
