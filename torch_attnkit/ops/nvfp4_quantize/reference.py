"""What nvfp4_quantize computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import nvfp4
from torch_attnkit.oracle import fp4


def reference(
    x: torch.Tensor, global_scale: torch.Tensor | None = None, scale_layout: str = "linear"
) -> tuple[torch.Tensor, torch.Tensor]:
    fp4.check_factor("nvfp4_quantize", global_scale)
    codes, scale = nvfp4.quantize(x, global_scale)  # (..., K/2), (..., K/16)
    return codes, fp4.store_scale(scale, scale_layout)
