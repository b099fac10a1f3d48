"""route_softmax on the CPU: PyTorch's own selection and softmax; the definition sorts all experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core import Call, Target
from torch_attnkit.kernels.routing.cpu import largest_of
from torch_attnkit.oracle import routing

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    k, a = call.dim["K"], call.arg

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        x = o.logits.float()  # (R, E)
        index = largest_of(x, k)  # (R, K)
        if a.softmax_first:
            p = x.softmax(1).gather(1, index)  # (R, K)
        else:
            p = x.gather(1, index).softmax(1)
        p = routing.scaled(p, a.renormalize, a.route_scale)
        # What is refused, and rows of nothing but -inf: each leaves NaN here, or an infinite scale does.
        if not bool(p.isfinite().all()):
            p, index = reference(o.logits, k, a.softmax_first, a.renormalize, a.route_scale)
        o.weights.copy_(p)
        o.indices.copy_(index)

    return launch
