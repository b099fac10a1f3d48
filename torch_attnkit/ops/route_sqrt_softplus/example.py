"""DeepSeek-V4's router: a bias steers which experts are chosen, but not their weights."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

logits, bias = torch.randn(5, 8), torch.zeros(8)  # (R, E), (E,)
bias[3] = 100.0  # expert 3 is always chosen
weights, indices = torch.ops.attnkit.route_sqrt_softplus(logits, bias, topk=2, route_scale=2.5)  # (R, K) each

score = torch.nn.functional.softplus(logits).sqrt().gather(1, indices.long())
assert (indices[:, 0] == 3).all()
torch.testing.assert_close(weights, 2.5 * score / score.sum(1, keepdim=True))
