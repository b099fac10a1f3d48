"""What DeepSeek-V4's attention computes by itself, beside the model's own functions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm, apply_rotary_pos_emb

import torch_attnkit
from torch_attnkit.integrations.transformers import deepseek_v4
from torch_attnkit.parity.runners import simulators


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_rotation_in_place_is_the_models_to_the_bit(dtype, back):
    gen = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 5, 3, 96, generator=gen).to(dtype), torch.randn(1, 5, 16, generator=gen)
    for kind in (dtype, torch.float32):
        cos, sin = angle.cos().to(kind), angle.sin().to(kind)
        wanted = apply_rotary_pos_emb(x, cos, -sin if back else sin, unsqueeze_dim=2)
        y = x.clone()
        assert deepseek_v4._rotated(y, deepseek_v4._angles(cos, sin), back) is y and torch.equal(y, wanted)
    learned = x.clone().requires_grad_()
    deepseek_v4._rotated(learned, deepseek_v4._angles(cos, sin), back).float().sum().backward()
    assert torch.equal(learned.detach(), x) and bool(learned.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_heads_is_nearer_to_float64_than_the_models(dtype):
    norm, x = DeepseekV4UnweightedRMSNorm(1e-6), torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y, theirs = (float((t.double() - exact).abs().mean()) for t in (deepseek_v4._normed(norm, x), norm(x)))
    assert y < theirs
    assert torch.equal(deepseek_v4._normed(norm, x.float()), norm(x.float()))


def heads(dtype, dim=64, pairs=8):
    gen = torch.Generator().manual_seed(0)
    angle = torch.randn(1, 5, pairs, generator=gen)
    q, kv = (torch.randn(*shape, dim, generator=gen).to(dtype) for shape in ((2, 5, 3), (2, 5)))
    return q, kv, angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_q_and_keys_in_one_launch_are_those_of_torch(dtype):
    """Angles of one sequence for both; keys to the bit, q to one rounding more."""
    norm, (q, kv, cos, sin) = DeepseekV4UnweightedRMSNorm(1e-6), heads(dtype)
    y, keys = deepseek_v4._in_one_launch(q, kv, cos, sin, norm.eps)
    angles = deepseek_v4._angles(cos, sin)
    theirs = deepseek_v4._rotated(deepseek_v4._normed(norm, q.clone()), angles)
    assert torch.equal(keys, deepseek_v4._rotated(kv[:, :, None].clone(), angles)[:, :, 0])
    assert y.shape == q.shape and float((y - theirs).abs().max()) <= 4 * torch.finfo(dtype).eps


def test_a_kernel_takes_what_it_has_rows_and_no_gradients_for():
    norm, given = DeepseekV4UnweightedRMSNorm(1e-6), heads(torch.bfloat16)
    takes = lambda q, kv, cos, sin, norm=norm: deepseek_v4._kernel_takes(norm, q, kv, cos)
    assert not takes(*given), "on a CPU torch is as fast"
    if missing := simulators()["metal"]:
        pytest.skip(missing)
    with torch_attnkit.simulate("metal"):
        assert takes(*given) and takes(*heads(torch.float32))
        assert not takes(*heads(torch.float64)) and not takes(*heads(torch.bfloat16, pairs=6))
        assert not takes(*heads(torch.bfloat16, dim=60)) and not takes(*heads(torch.bfloat16, dim=1032))
        assert not takes(*given, norm=torch.nn.Identity())
        learned = given[0].clone().requires_grad_()
        assert not takes(learned, *given[1:])
        with torch.no_grad():
            assert takes(learned, *given[1:])
