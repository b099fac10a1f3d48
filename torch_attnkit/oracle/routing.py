"""What the routers share: which logits are accepted, the score, and the scaling of the chosen weights."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks

TINY = 1e-20  # keeps 0 / 0 of a row whose chosen scores are all 0 at 0


def check_logits(op: str, logits: torch.Tensor) -> None:
    """Logits may be -inf (an expert switched off), but neither NaN nor +inf: no weights would be numbers."""
    checks.no_nan(op, "logits", logits)
    if bool((logits == torch.inf).any()):
        raise ValueError(f"{op}: logits holds inf, accepted: finite numbers and -inf")


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)) in float32, or float64 for float64: no overflow, and accurate in both tails."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (x.abs().neg().exp().log1p() + x.clamp(min=0)).sqrt()


def scaled(chosen: torch.Tensor, renormalize: bool, route_scale: float) -> torch.Tensor:
    """Scores of the chosen experts (..., K) to float32 weights: over their sum if asked, then scaled."""
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    return (chosen * route_scale).to(torch.float32)
