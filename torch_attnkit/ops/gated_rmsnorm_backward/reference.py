"""What gated_rmsnorm_backward computes."""

from __future__ import annotations

import torch


def reference(
    grad: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    acc = torch.promote_types(z.dtype, torch.float32)
    g, a, x, weight = grad.to(acc), y.to(acc), z.to(acc), w.to(acc)  # (..., N), w (N,)
    r = (a.square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    unit, s = a * r, x.sigmoid()
    h = g * weight * (x * s)  # the gradient of unit
    dy = r * (h - unit * (h * unit).mean(-1, keepdim=True))
    dz = g * weight * unit * (s * (1 + x * (-x).sigmoid()))
    dw = (g * unit * (x * s)).reshape(-1, w.shape[0]).sum(0)  # (N,)
    return dy.to(y.dtype), dz.to(z.dtype), dw.to(w.dtype)
