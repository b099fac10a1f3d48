"""flash_attention_varlen on Blackwell: flash_attention's kernels over packed sequences, in bf16, fp16 and E4M3.

The device code is ``cuda/sm100/prefill.py``, and for D 512 ``cuda/sm100/prefill_wide.py``. The loading warps find every
tile's sequence on the device, and the correction warps clear rows of V that belong to the next one. They have run in
the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_attnkit.core import Call, Target
from torch_attnkit.cuda import prefill_launch
from torch_attnkit.cuda.sm100 import prefill_plan


def build(call: Call, target: Target) -> Callable[..., None]:
    tokens = call.dim["Tq"]
    return prefill_launch.packed(call, target, lambda scores: prefill_plan.signature(call, tokens, scores))
