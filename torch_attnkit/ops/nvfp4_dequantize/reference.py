"""What nvfp4_dequantize computes."""

from __future__ import annotations

import math

import torch

from torch_attnkit.formats import nvfp4
from torch_attnkit.oracle import fp4


def reference(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    fp4.check_factor("nvfp4_dequantize", global_scale)
    batch, kb = codes.shape[:-1], codes.shape[-1] * 2 // nvfp4.BLOCK
    scale = fp4.load_scale(scale, scale_layout, math.prod(batch), kb).reshape(*batch, kb)  # (..., K/16)
    return nvfp4.dequantize(codes, scale, global_scale, dtype or torch.float32)  # (..., K)
