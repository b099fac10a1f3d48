"""The router of DeepSeek-V4's first layers: a table says which experts a token id goes to."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

logits = torch.randn(3, 8)  # (R, E)
token_ids = torch.tensor([4, 0, 4])  # (R,)
tid2eid = torch.tensor([[1, 2], [0, 3], [5, 6], [7, 0], [6, 2]])  # (V, K)
weights, indices = torch.ops.attnkit.route_hash(logits, token_ids, tid2eid, renormalize=False)  # (R, K) each

assert indices.tolist() == [[6, 2], [1, 2], [6, 2]]
torch.testing.assert_close(weights, torch.nn.functional.softplus(logits).sqrt().gather(1, indices.long()))
