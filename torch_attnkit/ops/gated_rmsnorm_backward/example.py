"""A training step through the output norm of a linear attention: autograd finds gated_rmsnorm's backward by itself."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

y = torch.randn(3, 5, 128, requires_grad=True)  # (..., N) in float32
z, w = torch.randn(3, 5, 128, requires_grad=True), torch.randn(128, requires_grad=True)
torch.ops.attnkit.gated_rmsnorm(y, z, w).square().sum().backward()

out = torch.ops.attnkit.gated_rmsnorm(y.detach(), z.detach(), w.detach())
dy, dz, dw = torch.ops.attnkit.gated_rmsnorm_backward(2 * out, y.detach(), z.detach(), w.detach())
for tensor, gradient in zip((y, z, w), (dy, dz, dw), strict=True):
    assert tensor.grad is not None and torch.equal(tensor.grad, gradient)

want = (w * y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * torch.nn.functional.silu(z)).square().sum()
for got, one in zip((dy, dz, dw), torch.autograd.grad(want, (y, z, w)), strict=True):
    torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
