"""What indexer_select computes: the largest of the scores."""

from __future__ import annotations

import torch

from torch_attnkit.ops.indexer_scores.reference import reference as scores_of
from torch_attnkit.ops.indexer_topk.reference import reference as largest_of


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    k_len: torch.Tensor,
    request_ids: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    format: str = "none",
    topk: int = 1,
) -> torch.Tensor:
    try:
        scores = scores_of(q, k, weights, k_len, request_ids, block_table, q_scale, k_scale, format)  # (Tq, S)
    except ValueError as refusal:
        raise ValueError(str(refusal).replace("indexer_scores", "indexer_select", 1)) from None
    return largest_of(scores, k_len, topk)
