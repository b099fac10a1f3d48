"""What route_hash computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks, routing


def reference(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    route_scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    routing.check_logits("route_hash", logits)
    checks.in_range("route_hash", "token_ids", token_ids, 0, tid2eid.shape[0] - 1)
    index = tid2eid[token_ids.long()]  # (R, K)
    checks.in_range("route_hash", "tid2eid[token_ids]", index, 0, logits.shape[1] - 1)
    chosen = routing.sqrt_softplus(logits).gather(-1, index.long())  # (R, K)
    return routing.scaled(chosen, renormalize, route_scale), index.to(torch.int32)
