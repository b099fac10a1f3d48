"""What linear_decode computes."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = x.to(dtype) @ weight.to(dtype).T  # (Tq, N)
    return (out if bias is None else out + bias.to(dtype)).to(x.dtype)
