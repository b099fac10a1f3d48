"""A decode step of two sequences, whose states lie in a pool of four slots."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, k = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)  # (B, n, Hk, K)
v = torch.randn(2, 1, 4, 32)  # (B, n, Hv, V): two value heads share a key head
a, b = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
A_log, dt_bias = torch.zeros(4), torch.zeros(4)
state = torch.zeros(4, 4, 32, 64)  # (Ns, Hv, V, K)
slots = torch.tensor([[3], [1]], dtype=torch.int32)

out = torch.ops.attnkit.gated_delta_step(q, k, v, a, b, A_log, dt_bias, state, slots)

# From a state of zeros a token is beta v (k' q').
key, query = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, 2) for x in (k, q))
expected = b.sigmoid()[..., None] * v * (key * query).sum(-1, keepdim=True) / 64**0.5
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
assert not state[0].any() and state[3].any()
