"""What mxfp4_quantize computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import mxfp4
from torch_attnkit.oracle import fp4


def reference(
    x: torch.Tensor, scale_layout: str = "linear", rounding: str = "ceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = mxfp4.quantize(x, rounding)  # (..., K/2), (..., K/32)
    return codes, fp4.store_scale(scale, scale_layout)
