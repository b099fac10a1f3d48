"""A prompt of five tokens, and a decode step behind it."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

x, weight = torch.randn(6, 32), torch.randn(32, 4)  # (Tq, C), (C, W)
state = torch.zeros(2, 32, 3)  # (Ns, C, Ws): two slots
slot = torch.tensor([1], dtype=torch.int32)
prompt, step = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 1))
conv = torch.ops.attnkit.causal_conv1d
out = torch.cat([conv(x[:5], weight, state, prompt, slot), conv(x[5:], weight, state, step, slot)])

padded = torch.nn.functional.pad(x.T, (3, 0))
expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded[None], weight[:, None], groups=32)[0].T)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
assert torch.equal(state[1], x[3:].T) and not state[0].any()
