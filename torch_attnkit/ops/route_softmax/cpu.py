"""route_softmax on the CPU: one pass over few rows (csrc/cpu), else PyTorch's own selection and softmax; the definition
sorts all experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.kernels.routing.cpu import in_one, ranked, store

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    k, a = call.dim["K"], call.arg
    usual = math.isfinite(a.route_scale) and call.dim["R"] > 0
    # Over the sum of the chosen, a softmax of all experts is that of the chosen.
    over_all = a.softmax_first and not a.renormalize

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        x = o.logits.float()  # (R, E)
        found = ranked(x, k) if usual else None
        if found is None:  # among them what is refused
            weights, indices = reference(o.logits, k, a.softmax_first, a.renormalize, a.route_scale)
            o.weights.copy_(weights)
            o.indices.copy_(indices)
            return
        top, index = found  # (R, K) each
        o.indices.copy_(index)
        if over_all:
            store(x.softmax(1).gather(1, index), False, a.route_scale, o.weights)
            return
        torch.softmax(top, 1, out=o.weights)
        if a.route_scale != 1:
            o.weights.mul_(a.route_scale)

    if not (usual and in_one(a.logits)):
        return launch
    kernel = cpu.kernels.SoftmaxRouter(
        [*a.logits.shape, k], step=a.logits.stride(0), over_all=a.softmax_first, renormalize=a.renormalize,
        route_scale=a.route_scale,
    )  # fmt: skip
    many = exact(launch)

    @ready(kernel)
    def few(
        logits: torch.Tensor, topk: int, softmax_first: bool, renormalize: bool, route_scale: float,
        weights: torch.Tensor, indices: torch.Tensor,
    ) -> None:  # fmt: skip
        if not kernel(logits.data_ptr(), weights.data_ptr(), indices.data_ptr()):
            many(logits, topk, softmax_first, renormalize, route_scale, weights, indices)

    return few
