"""Scores and choice as one op: the scores are never seen."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit
q, weights = torch.randn(3, 4, 32), torch.rand(3, 4)  # (Tq, Hi, D), (Tq, Hi)
k = torch.randn(1, 50, 32)  # (R, S, D)
k_len = torch.tensor([48, 49, 50], dtype=torch.int32)  # (Tq,)
indices = ops.indexer_select(q, k, weights, k_len, topk=8)  # (Tq, K)

assert torch.equal(indices, ops.indexer_topk(ops.indexer_scores(q, k, weights, k_len), k_len, topk=8))
