"""What the routers share: which logits are accepted, the score, and the scaling of the chosen weights."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks

TINY = 1e-20  # keeps 0 / 0 of a row whose chosen scores are all 0 at 0
FAR = -40.0  # below it sqrt(log(1 + e^x)) is e^(x/2) in float64, too
NOTHING = -104.0  # below it e^x is 0 in float32, and so is the score


def check_logits(op: str, logits: torch.Tensor) -> None:
    """Logits may be -inf (an expert switched off), but neither NaN nor +inf: no weights would be numbers."""
    checks.no_nan(op, "logits", logits)
    if bool((logits == torch.inf).any()):
        raise ValueError(f"{op}: logits holds inf, accepted: finite numbers and -inf")


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)) in float32, or float64 for float64; 0 below ``NOTHING``. No overflow, and accurate in both
    tails: e^x itself is subnormal in float32 from -87 down, with fewer bits the smaller it is, and e^(x/2) is not."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    root = (x.abs().neg().exp().log1p() + x.clamp(min=0)).sqrt()
    return torch.where(x < FAR, (x / 2).exp(), root).masked_fill(x < NOTHING, 0.0)


def scaled(chosen: torch.Tensor, renormalize: bool, route_scale: float) -> torch.Tensor:
    """Scores of the chosen experts (..., K) to float32 weights: over their sum if asked, then scaled."""
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    return (chosen * route_scale).to(torch.float32)
