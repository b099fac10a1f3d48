"""GPT-OSS' router: the 2 largest of 8 logits, weighted by a softmax over the two."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

logits = torch.randn(5, 8)  # (R, E)
weights, indices = torch.ops.attnkit.route_softmax(logits, topk=2)  # (R, K) each

largest, order = logits.topk(2)
torch.testing.assert_close(weights, largest.softmax(-1))
assert torch.equal(indices, order.int())
