"""route_sqrt_softplus on the CPU: PyTorch's own selection; the definition sorts all experts."""

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
        s = routing.sqrt_softplus(o.logits)  # (R, E)
        steered = s if o.bias is None else s + o.bias
        # NaN, which is refused, and infinite logits and biases leave something here that is not finite.
        if bool(steered.isfinite().all()):
            index = largest_of(steered, k)  # (R, K)
            p = routing.scaled(s.gather(1, index), a.renormalize, a.route_scale)
        else:
            p, index = reference(o.logits, o.bias, k, a.route_scale, a.renormalize)
        o.weights.copy_(p)
        o.indices.copy_(index)

    return launch
