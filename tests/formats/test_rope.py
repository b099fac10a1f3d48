"""Rotary embedding against complex multiplication and against the models of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import rope

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def angles(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=gen, dtype=torch.float64) * 6.3


def rotate(x: torch.Tensor, theta: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Float64 (..., R) times e^(i theta), the pair as real and imaginary part."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(theta), theta)
    parts = (z.real, z.imag)
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


@pytest.mark.parametrize("interleaved", (True, False))
@pytest.mark.parametrize("inverse", (True, False))
@pytest.mark.parametrize("trailing", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_multiplication_by_a_unit_number(dtype, trailing, inverse, interleaved):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 24, generator=gen, dtype=torch.float64).to(dtype)
    theta = angles(5, 1, 8)
    before = x.clone()
    table = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = theta.cos().to(table), theta.sin().to(table)
    got = rope.apply(x, cos, sin, interleaved=interleaved, inverse=inverse, trailing=trailing)
    assert got.dtype == dtype and torch.equal(x, before)
    rotated, copied = (slice(8, 24), slice(0, 8)) if trailing else (slice(0, 16), slice(16, 24))
    assert torch.equal(got[..., copied], x[..., copied])
    exact = rotate(x[..., rotated].double(), -theta if inverse else theta, interleaved)
    error = (got[..., rotated].double() - exact).abs().max()
    # Rounded tables, two products and a sum in the table's dtype; then the store.
    bound = 4 * torch.finfo(table).eps + torch.finfo(dtype).eps
    assert error <= bound * x.double().abs().max()
    if dtype in (torch.float16, torch.bfloat16):  # The store is the only rounding to the dtype.
        wide = rope.apply(x.float(), cos, sin, interleaved=interleaved, inverse=inverse, trailing=trailing)
        assert torch.equal(got, wide.to(dtype))


def test_float32_order_of_operations():
    """Two rounded products and a rounded sum, which numpy evaluates without fusing."""
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(64, 8, generator=gen)
    theta = angles(64, 4).float()
    c, s = theta.cos().numpy(), theta.sin().numpy()
    got = rope.apply(x, theta.cos(), theta.sin(), interleaved=True).numpy()
    a, b = x.numpy()[:, 0::2], x.numpy()[:, 1::2]
    assert got[:, 0::2].tolist() == (a * c - b * s).tolist()
    assert got[:, 1::2].tolist() == (b * c + a * s).tolist()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.integers(0, 8))
def test_inverse_undoes(seed, interleaved, trailing, half):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 16, generator=gen)
    theta = angles(4, half, seed=seed)
    cos, sin = theta.cos().float(), theta.sin().float()
    rotated_x = rope.apply(x, cos, sin, interleaved=interleaved, trailing=trailing)
    back = rope.apply(rotated_x, cos, sin, interleaved=interleaved, inverse=True, trailing=trailing)
    assert (back - x).abs().max() <= 8 * torch.finfo(torch.float32).eps * x.abs().max()
    # Pairs keep their length.
    assert torch.allclose(rotated_x.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_broadcast_strided_and_empty():
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(16, 2, 7, generator=gen).permute(2, 1, 0)  # (7, 2, 16)
    theta = angles(16, 7).T[:, :4].float()  # (7, 4), strided
    cos, sin = theta.cos()[:, None], theta.sin()[:, None]
    got = rope.apply(x, cos, sin, interleaved=False)
    for t in range(7):
        for h in range(2):
            one = rope.apply(x[t, h].clone(), cos[t, 0], sin[t, 0], interleaved=False)
            assert torch.equal(got[t, h], one)
    empty = rope.apply(x[:0], cos[:0], sin[:0], interleaved=True)
    assert empty.shape == (0, 2, 16)
    none = rope.apply(x, cos[..., :0], sin[..., :0], interleaved=True)
    assert torch.equal(none, x) and none.data_ptr() != x.data_ptr()


def test_signed_zero_nan_and_infinity_stay_in_their_pair():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[-0.0, nan, 1.0, inf, 2.0, 3.0]])
    one, zero = torch.ones(1, 2), torch.zeros(1, 2)
    got = rope.apply(x, one, zero, interleaved=True)[0]
    assert torch.signbit(got[0]) and got[1].isnan()  # Outside the rotated channels: copied.
    assert got[2].isnan() and got[3] == inf  # 1 - inf * 0.
    assert got[4:].tolist() == [2.0, 3.0]


def test_half_split_is_the_llama_rotation():
    module = pytest.importorskip("transformers.models.llama.modeling_llama", reason="no transformers")
    gen = torch.Generator().manual_seed(4)
    q = torch.randn(2, 3, 5, 16, generator=gen)  # (B, H, T, D)
    theta = angles(2, 5, 8).float()
    cos, sin = theta.cos(), theta.sin()
    full = [torch.cat((t, t), dim=-1) for t in (cos, sin)]
    theirs, _ = module.apply_rotary_pos_emb(q, q, *full)
    ours = rope.apply(q, cos[:, None], sin[:, None], interleaved=False)
    assert torch.allclose(ours, theirs, rtol=0, atol=4 * torch.finfo(torch.float32).eps * 4)


def test_trailing_interleaved_is_the_deepseek_v4_rotation():
    module = pytest.importorskip(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="no transformers with it"
    )
    gen = torch.Generator().manual_seed(5)
    q = torch.randn(2, 3, 5, 24, generator=gen)  # (B, H, T, D), of which 16 rotate.
    theta = angles(2, 5, 8).float()
    cos, sin = theta.cos(), theta.sin()
    bound = 16 * torch.finfo(torch.float32).eps
    for sign, inverse in ((1.0, False), (-1.0, True)):
        theirs = module.apply_rotary_pos_emb(q, cos, sign * sin)
        ours = rope.apply(q, cos[:, None], sin[:, None], interleaved=True, inverse=inverse)
        assert torch.allclose(ours, theirs, rtol=0, atol=bound)


def test_refusals():
    x, c = torch.zeros(4, 8), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"cos has shape \(4, 2\), sin \(4, 1\); accepted: equal"):
        rope.apply(x, c, c[:, :1], interleaved=True)
    with pytest.raises(ValueError, match="last axis 5, for 10 rotated channels; accepted: at most 4"):
        rope.apply(x, torch.zeros(4, 5), torch.zeros(4, 5), interleaved=True)
    with pytest.raises(ValueError, match=r"cos has batch axes \(3,\); .* broadcast to \(4,\)"):
        rope.apply(x, torch.zeros(3, 2), torch.zeros(3, 2), interleaved=True)
    with pytest.raises(TypeError, match="rope.apply: x is torch.int32"):
        rope.apply(x.int(), c, c, interleaved=True)
    with pytest.raises(TypeError, match="rope.apply: sin is torch.complex64"):
        rope.apply(x, c, c.to(torch.complex64), interleaved=True)
