"""What route_sqrt_softplus computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks, routing
from torch_attnkit.oracle.topk import largest


def reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    topk: int = 1,
    route_scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    routing.check_logits("route_sqrt_softplus", logits)
    checks.no_nan("route_sqrt_softplus", "bias", bias)
    s = routing.sqrt_softplus(logits)  # (R, E)
    index = largest(s if bias is None else s + bias, topk)  # (R, K)
    return routing.scaled(s.gather(-1, index), renormalize, route_scale), index.to(torch.int32)
