"""A weight to NVFP4, half a byte a number and a scale per 16, and back."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

x = torch.randn(4, 64)
global_scale = 448 * 6 / x.abs().max()  # uses the whole range of scales and elements
codes, scale = torch.ops.attnkit.nvfp4_quantize(x, global_scale)  # (4, 32) and (4, 4) bytes

back = torch.ops.attnkit.nvfp4_dequantize(codes, scale, global_scale)  # (4, 64) in float32
assert (back - x).norm() < 0.12 * x.norm()
