"""What indexer_topk computes."""

from __future__ import annotations

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.topk import largest


def reference(scores: torch.Tensor, k_len: torch.Tensor | None = None, topk: int = 1) -> torch.Tensor:
    Tq, S = scores.shape
    checks.in_range("indexer_topk", "k_len", k_len, 0, S)
    entry = torch.arange(S, device=scores.device)  # (S,)
    hidden = scores.isnan() if k_len is None else scores.isnan() | (entry >= k_len[:, None])  # (Tq, S)
    s = scores.masked_fill(hidden, -torch.inf)
    index = largest(s, min(topk, S))  # (Tq, min(K, S))
    # S stands behind every entry, so that one sort puts the absent ones last.
    index = index.masked_fill(s.gather(-1, index) == -torch.inf, S).sort(-1).values
    out = torch.full((Tq, topk), -1, dtype=torch.int32, device=scores.device)  # (Tq, K)
    out[:, : index.shape[1]] = index.masked_fill(index == S, -1)
    return out
