"""gated_rmsnorm on the CPU: PyTorch's own norm and gate, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from torch_attnkit.core import Call, Target


def build(call: Call, target: Target) -> Callable[..., None]:
    shape = (call.dim["N"],)

    def launch(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        normed = F.rms_norm(y.float(), shape, w.float(), eps)  # (..., N)
        torch.mul(normed, F.silu(z.float()), out=out)

    return launch
