"""Attention output is rotated back to position 0 and quantised; here the angle is 0, so that nothing turns."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

o = torch.randn(3, 4, 64)  # (Tq, Hq, D)
cos, sin = torch.ones(3, 8), torch.zeros(3, 8)  # (Tq, R2): the last 16 channels are 8 pairs
codes, scale = torch.ops.attnkit.inverse_rope_fp4(o, cos, sin, format="mxfp4")  # (Tq, Hq, D/2), (Tq, Hq, D/32)

want = torch.ops.attnkit.mxfp4_quantize(o)
assert torch.equal(codes, want[0]) and torch.equal(scale, want[1])
