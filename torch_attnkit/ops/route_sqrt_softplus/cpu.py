"""route_sqrt_softplus on the CPU: one pass over few rows (csrc/cpu), else PyTorch's own selection; the definition sorts
all experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.kernels.routing.cpu import in_one, ranked, sqrt_softplus, store

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    k, a = call.dim["K"], call.arg
    usual = math.isfinite(a.route_scale) and call.dim["R"] > 0

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        s = sqrt_softplus(o.logits)  # (R, E)
        found = ranked(s if o.bias is None else s + o.bias, k) if usual else None
        if found is None:  # among them what is refused
            weights, indices = reference(o.logits, o.bias, k, a.route_scale, a.renormalize)
            o.weights.copy_(weights)
            o.indices.copy_(indices)
            return
        top, index = found  # (R, K) each
        o.indices.copy_(index)
        store(top if o.bias is None else s.gather(1, index), a.renormalize, a.route_scale, o.weights)

    if not (usual and in_one(a.logits)):
        return launch
    kernel = cpu.kernels.SqrtSoftplusRouter(
        [*a.logits.shape, k], step=a.logits.stride(0), renormalize=a.renormalize, route_scale=a.route_scale
    )
    many = exact(launch)

    @ready(kernel)
    def few(
        logits: torch.Tensor, bias: torch.Tensor | None, topk: int, route_scale: float, renormalize: bool,
        weights: torch.Tensor, indices: torch.Tensor,
    ) -> None:  # fmt: skip
        if not kernel(logits.data_ptr(), cpu.address(bias), weights.data_ptr(), indices.data_ptr()):
            many(logits, bias, topk, route_scale, renormalize, weights, indices)

    return few
