"""gated_rmsnorm on the CPU, in float32: one pass over few rows (csrc/cpu), else PyTorch's own norm and gate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready

_FEW = 1 << 15  # numbers that one thread is through with in 40 us, when PyTorch's three calls have just begun


def build(call: Call, target: Target) -> Callable[..., None]:
    N, rows, a = call.dim["N"], math.prod(call.batch), call.arg
    shape = (N,)
    native = cpu.kernels is not None and 0 < rows * N <= _FEW
    native = native and all(t.dtype == torch.float32 and t.is_contiguous() for t in (a.y, a.z, a.w))

    def launch(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        normed = F.rms_norm(y.float(), shape, w.float(), eps)  # (..., N)
        torch.mul(normed, F.silu(z.float()), out=out)

    if not native:
        return launch
    kernel = cpu.kernels.Norm(rows, N, eps=a.eps)

    @ready(kernel)
    def in_one(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        kernel(y.data_ptr(), z.data_ptr(), w.data_ptr(), out.data_ptr())

    return in_one
