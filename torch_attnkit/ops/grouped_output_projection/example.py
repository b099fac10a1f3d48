"""Eight heads in two groups, each group through a matrix of its own."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

o = torch.randn(5, 8, 64)  # (Tq, Hq, D)
wo_a = torch.randn(2, 32, 4 * 64)  # (G, R, K): four heads of 64 are the 256 numbers of a group
out = torch.ops.attnkit.grouped_output_projection(o.view(5, 2, 256), wo_a)  # (Tq, G, R)

torch.testing.assert_close(out[:, 1], o[:, 4:].flatten(1) @ wo_a[1].T, atol=1e-4, rtol=1e-4)
