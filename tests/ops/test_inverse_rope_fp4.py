"""inverse_rope_fp4: the rotation, then exactly what the quantising ops say, and the scales of groups of heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

A = torch.ops.attnkit
op = A.inverse_rope_fp4


def _quantize(x, format, gs=None, **kwargs):
    return A.nvfp4_quantize(x, gs, **kwargs) if format == "nvfp4" else A.mxfp4_quantize(x, **kwargs)


def _rotate_back(o, cos, sin):
    """Pair by pair with float32 numbers: (a, b) to (a cos + b sin, b cos - a sin), then to the dtype of o."""
    out, start = o.clone(), o.shape[-1] - 2 * cos.shape[-1]
    for i in range(cos.shape[-1]):
        a, b = o[..., start + 2 * i].float(), o[..., start + 2 * i + 1].float()
        c, s = cos[:, i, None].float(), sin[:, i, None].float()
        out[..., start + 2 * i] = (a * c + b * s).to(o.dtype)
        out[..., start + 2 * i + 1] = (b * c - a * s).to(o.dtype)
    return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    d=st.sampled_from((32, 96)),
    pairs=st.integers(0, 16),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    angles=st.booleans(),
    format=st.sampled_from(("nvfp4", "mxfp4")),
    scaled=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rotates_then_quantizes_each_head(tokens, heads, d, pairs, dtype, angles, format, scaled, seed):
    gen = torch.Generator().manual_seed(seed)
    o, angle = torch.randn(tokens, heads, d, generator=gen).to(dtype), 7 * torch.rand(tokens, pairs, generator=gen)
    cos, sin = (t.to(dtype if angles else torch.float32) for t in (angle.cos(), angle.sin()))
    gs = torch.tensor(400.0) if scaled and format == "nvfp4" else None
    codes, scale = op(o, cos, sin, gs, format=format)
    want_codes, want_scale = _quantize(_rotate_back(o, cos, sin), format, gs)
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)


def test_quarter_turns_only_move_numbers():
    o = torch.randn(4, 2, 64)
    cos, sin = torch.tensor((1.0, 0.0, -1.0, 0.0))[:, None], torch.tensor((0.0, 1.0, 0.0, -1.0))[:, None]
    want = o.clone()
    a, b = o[..., -2], o[..., -1]
    want[1, :, -2], want[1, :, -1] = b[1], -a[1]
    want[2, :, -2:] = -o[2, :, -2:]
    want[3, :, -2], want[3, :, -1] = -b[3], a[3]
    codes, scale = op(o, cos, sin)
    want_codes, want_scale = _quantize(want, "nvfp4")
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)


def test_it_undoes_the_rotation_of_the_keys():
    """What turned by an angle is turned back by the same angle, to the rounding of float32."""
    o, angle = torch.randn(5, 2, 64, dtype=torch.float64), torch.rand(5, 32, dtype=torch.float64) * 6
    pair = torch.view_as_complex(o.unflatten(-1, (32, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    rotated = torch.view_as_real(pair).flatten(-2).float()
    codes, scale = op(rotated, angle.cos().float(), angle.sin().float())
    want_codes, want_scale = _quantize(o.float(), "nvfp4")
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)  # no number is that near to a midpoint


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(3, 4, 1), (3, 4, 2), (130, 6, 3), (0, 2, 2), (2, 3, 3)])
def test_swizzled_scales_are_one_matrix_per_group_of_heads(format, tokens, heads, groups):
    o, none = torch.randn(tokens, heads, 96), torch.zeros(tokens, 0)
    codes, scale = op(o, none, none, groups=groups, format=format, scale_layout="128x4")
    parts = o.view(tokens, groups, heads // groups * 96).unbind(1)
    want = torch.stack([_quantize(p, format, scale_layout="128x4")[1] for p in parts])
    assert torch.equal(codes, op(o, none, none, format=format)[0])
    assert torch.equal(scale, want)


def test_linear_scales_do_not_depend_on_groups():
    o, angle = torch.randn(3, 4, 32), torch.rand(3, 8)
    one, two = (op(o, angle.cos(), angle.sin(), groups=g) for g in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_refusals_name_op_argument_found_and_accepted():
    def refused(kind, message, *args, **kwargs):
        with pytest.raises(kind, match=f"^inverse_rope_fp4: {message}"):
            op(*args, **kwargs)

    o, c = torch.randn(3, 4, 32), torch.rand(3, 8)
    refused(ValueError, r"sin must be \(Tq, R2\), got shape \(3, 7\): R2=7, but cos has R2=8", o, c, c[:, :7])
    refused(ValueError, "cos and sin must have at most D/2 columns.*R2=17", o, torch.rand(3, 17), torch.rand(3, 17))
    refused(ValueError, "D must be a multiple of the block of format, 16 for nvfp4.*D=24", o[..., :24], c, c)
    refused(ValueError, "D must be a multiple of the block of format.*D=16", o[..., :16], c, c, format="mxfp4")
    for groups in (0, -1, 3):
        refused(ValueError, "groups must be at least 1 and divide Hq .*Hq=4", o, c, c, groups=groups)
    refused(ValueError, "global_scale is accepted with format 'nvfp4' only", o, c, c, torch.ones(()), format="mxfp4")
    refused(ValueError, "global_scale is -1, accepted: finite numbers above 0", o, c, c, torch.tensor(-1.0))
    refused(ValueError, "format is 'fp8', accepted: nvfp4, mxfp4", o, c, c, format="fp8")
    refused(TypeError, "cos is bf16, accepted: f32", o, c.bfloat16(), c)
    refused(TypeError, "o is i32, accepted: f32, bf16, f16, f64", o.int(), c, c)
