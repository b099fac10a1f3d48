"""What DeepSeek-V4's attention computes by itself, beside the model's own functions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm, apply_rotary_pos_emb

from torch_attnkit.integrations.transformers import deepseek_v4


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_rotation_in_place_is_the_models_to_the_bit(dtype, back):
    gen = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 5, 3, 96, generator=gen).to(dtype), torch.randn(1, 5, 16, generator=gen)
    for kind in (dtype, torch.float32):
        cos, sin = angle.cos().to(kind), angle.sin().to(kind)
        wanted = apply_rotary_pos_emb(x, cos, -sin if back else sin, unsqueeze_dim=2)
        mine = x.clone()
        assert deepseek_v4._rotated(mine, deepseek_v4._angles(cos, sin), back) is mine and torch.equal(mine, wanted)
    learned = x.clone().requires_grad_()
    deepseek_v4._rotated(learned, deepseek_v4._angles(cos, sin), back).float().sum().backward()
    assert torch.equal(learned.detach(), x) and bool(learned.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_heads_is_nearer_to_float64_than_the_models(dtype):
    norm, x = DeepseekV4UnweightedRMSNorm(1e-6), torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    mine, theirs = (float((t.double() - exact).abs().mean()) for t in (deepseek_v4._normed(norm, x), norm(x)))
    assert mine < theirs
    assert torch.equal(deepseek_v4._normed(norm, x.float()), norm(x.float()))
