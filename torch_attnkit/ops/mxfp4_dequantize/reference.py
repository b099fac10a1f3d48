"""What mxfp4_dequantize computes."""

from __future__ import annotations

import math

import torch

from torch_attnkit.formats import mxfp4
from torch_attnkit.oracle import fp4


def reference(
    codes: torch.Tensor, scale: torch.Tensor, scale_layout: str = "linear", dtype: torch.dtype | None = None
) -> torch.Tensor:
    batch, kb = codes.shape[:-1], codes.shape[-1] * 2 // mxfp4.BLOCK
    scale = fp4.load_scale(scale, scale_layout, math.prod(batch), kb).reshape(*batch, kb)  # (..., K/32)
    return mxfp4.dequantize(codes, scale, dtype or torch.float32)  # (..., K)
