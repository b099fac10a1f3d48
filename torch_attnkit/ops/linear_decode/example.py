"""A decode step's output projection: two tokens of 512 numbers to 96."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

x = torch.randn(2, 512)  # (Tq, K)
weight, bias = torch.randn(96, 512), torch.randn(96)  # (N, K), (N,)
out = torch.ops.attnkit.linear_decode(x, weight, bias)

assert out.shape == (2, 96)
assert torch.allclose(out, torch.nn.functional.linear(x, weight, bias), atol=1e-3)
