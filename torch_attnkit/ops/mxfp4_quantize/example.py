"""A row to MXFP4: scales are powers of two, so numbers that are a power of two apart have the same codes."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

x = torch.randn(2, 32)
x[1] = 8 * x[0]
codes, scale = torch.ops.attnkit.mxfp4_quantize(x)  # (2, 16) and (2, 1) bytes

assert torch.equal(codes[0], codes[1]) and scale[1] - scale[0] == 3
assert (torch.ops.attnkit.mxfp4_dequantize(codes, scale) - x).norm() < 0.15 * x.norm()
