"""What route_softmax computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import routing
from torch_attnkit.oracle.topk import largest


def reference(
    logits: torch.Tensor,
    topk: int,
    softmax_first: bool = False,
    renormalize: bool = False,
    route_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    routing.check_logits("route_softmax", logits)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (R, E)
    index = largest(x, topk)  # (R, K)
    chosen = x.gather(-1, index)  # (R, K)
    top = chosen[:, :1].masked_fill(chosen[:, :1] == -torch.inf, 0.0)  # (R, 1), the row's largest
    total = ((x if softmax_first else chosen) - top).exp().sum(-1, keepdim=True)  # (R, 1)
    p = (chosen - top).exp() / total.masked_fill(total == 0, 1.0)  # (R, K)
    return routing.scaled(p, renormalize, route_scale), index.to(torch.int32)
