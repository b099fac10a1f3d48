"""Two blocks of NVFP4 by hand: the numbers of codes 0 to 15 under a scale of 1, and the same under 2."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

pairs = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)  # the even one lies low
scale = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)  # (K/16,)
x = torch.ops.attnkit.nvfp4_dequantize(pairs.repeat(2), scale, dtype=torch.bfloat16)  # (32,)

assert x[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and torch.equal(x[8:16], -x[:8])
assert torch.equal(x[16:], 2 * x[:16])
