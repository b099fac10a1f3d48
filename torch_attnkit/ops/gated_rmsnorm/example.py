"""The output norm of a linear attention: y is its float32 state, z the gate in the model's dtype."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

y = torch.randn(3, 5, 128)  # (..., N) in float32
z, w = torch.randn(3, 5, 128, dtype=torch.bfloat16), torch.randn(128, dtype=torch.bfloat16)
out = torch.ops.attnkit.gated_rmsnorm(y, z, w, eps=1e-6)  # (..., N) in bfloat16

want = w.float() * y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * torch.nn.functional.silu(z.float())
torch.testing.assert_close(out, want.bfloat16())
