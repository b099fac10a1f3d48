"""A decode step of two sequences with a gate for each channel; its states lie in a pool of three slots."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, k = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)  # (B, n, H, K)
v = torch.randn(2, 1, 2, 32)  # (B, n, H, V)
a, b = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2)
A_log, dt_bias = torch.zeros(2), torch.zeros(2, 64)
state = torch.ones(3, 2, 32, 64)  # (Ns, H, V, K)
slots = torch.tensor([[2], [0]], dtype=torch.int32)

torch.ops.attnkit.kimi_delta_step(q, k, torch.zeros_like(v), a, b - 100.0, A_log, dt_bias, state, slots)

# With beta next to 0 a token decays the state and adds nothing: channel by channel, not head by head.
decay = torch.exp(-torch.nn.functional.softplus(a[:, 0]))[:, :, None].expand(2, 2, 32, 64)
torch.testing.assert_close(state[[2, 0]], decay)
assert torch.equal(state[1], torch.ones(2, 32, 64))
