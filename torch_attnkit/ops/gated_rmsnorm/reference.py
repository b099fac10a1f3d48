"""What gated_rmsnorm computes."""

from __future__ import annotations

import torch


def reference(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    acc = torch.promote_types(z.dtype, torch.float32)
    a, g = y.to(acc), z.to(acc)  # (..., N)
    r = (a.square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    return (a * r * w.to(acc) * (g * g.sigmoid())).to(z.dtype)  # (..., N)
