"""One block of MXFP4 by hand: a scale byte of 127 + n stands for 2 ** n."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

codes = torch.full((16,), 0x71, dtype=torch.uint8)  # 0x1 is 0.5 and comes first, 0x7 is 6
scale = torch.tensor([127 + 3], dtype=torch.uint8)
x = torch.ops.attnkit.mxfp4_dequantize(codes, scale)  # (32,) in float32

assert x.tolist() == [4.0, 48.0] * 16
