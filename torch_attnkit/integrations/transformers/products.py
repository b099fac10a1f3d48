"""Products of few tokens with a weight, as a decode step has them: ``linear_decode`` where it has a row.

Those to q, k and v, from heads, and of routers. Libraries cut K among CTAs and add the parts up in a launch of its own;
the op does both in one. Other tokens, dtypes and devices, and whoever asks for gradients, get ``F.linear``.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import target_of
from torch_attnkit.kernels.batched_gemm import MOST_FEW

ops = torch.ops.attnkit


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` of x (..., K), weight (N, K) and bias (N): (..., N). Weight and bias are plain tensors."""
    if weight.dtype.itemsize != 2 or x.dtype != weight.dtype:  # first: on a CPU it is what most models answer
        return F.linear(x, weight, bias)
    tokens = x.shape[:-1].numel()
    if tokens > MOST_FEW or weight.shape[1] % 32 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, weight, bias)]):
        return F.linear(x, weight, bias)
    if not has_row("linear_decode", weight.device, weight.dtype):
        return F.linear(x, weight, bias)
    return ops.linear_decode(x.reshape(tokens, -1).contiguous(), weight, bias).view(*x.shape[:-1], -1)


# In a trace constants: which target it is says a context variable, which none can ask for.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def target_arch(device: torch.device) -> str:
    """The architecture of ``device``, or the simulated one."""
    return target_of(device).arch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_row(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``op`` has a kernel for calls in ``dtype`` on ``device``."""
    return _row(op, target_of(device).arch, dtype)


@functools.cache
def _row(op: str, arch: str, dtype: torch.dtype) -> bool:
    return any(arch in row.archs and short(dtype) in row.dtypes.split() for row in OPS[op].kernels)
