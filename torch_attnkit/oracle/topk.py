"""Deterministic top-k: largest first, ties to the lowest index.

``torch.topk`` leaves the order of equal values open, and it differs between devices; a stable sort does not.
"""

from __future__ import annotations

import torch


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (..., k) int64 of the k largest of x (..., E), descending, the lower index first among equals.

    k is at most E, and x holds no NaN (a sort would put it first).
    """
    order = x.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :k].clone(memory_format=torch.contiguous_format)
