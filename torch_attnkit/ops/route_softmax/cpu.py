"""route_softmax on the CPU: one pass over few rows (csrc/cpu), else PyTorch's own selection and softmax; the definition
sorts all experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.kernels.routing.cpu import in_one, ranked, store

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    k, a = call.dim["K"], call.arg
    usual = math.isfinite(a.route_scale) and call.dim["R"] > 0
    (R, E), step = a.logits.shape, a.logits.stride(0)
    native = usual and in_one(a.logits)
    # Over the sum of the chosen, a softmax of all experts is that of the chosen.
    over_all = a.softmax_first and not a.renormalize

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        if native and cpu.kernels.route_softmax(
            o.logits.data_ptr(), step, R, E, k, a.softmax_first, a.renormalize, a.route_scale,
            o.weights.data_ptr(), o.indices.data_ptr(),
        ):  # fmt: skip
            return
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

    return launch
