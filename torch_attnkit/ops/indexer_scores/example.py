"""How relevant ten compressed entries are to two tokens, the first of which sees four of them."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, weights = torch.randn(2, 4, 32), torch.rand(2, 4)  # (Tq, Hi, D), (Tq, Hi)
k = torch.randn(1, 10, 32)  # (R, S, D)
k_len = torch.tensor([4, 10], dtype=torch.int32)  # (Tq,)
scores = torch.ops.attnkit.indexer_scores(q, k, weights, k_len)  # (Tq, S)

want = (weights[:, :, None] * (q @ k[0].T).relu()).sum(1)
want[0, 4:] = -torch.inf
torch.testing.assert_close(scores, want)
