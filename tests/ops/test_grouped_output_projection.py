"""grouped_output_projection: against a loop over groups, in every format and layout, and after inverse_rope_fp4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.grouped_output_projection
A = torch.ops.attnkit


def _coded(x, format, layout, g=None):
    """Groups' matrices (G, M, K) to codes, scales per group in the layout, and the numbers they stand for."""
    quantize = A.nvfp4_quantize if format == "nvfp4" else A.mxfp4_quantize
    given = () if g is None else (g,)
    codes, linear = quantize(x, *given)
    dequantize = A.nvfp4_dequantize if format == "nvfp4" else A.mxfp4_dequantize
    scale = linear if layout == "linear" else torch.stack([quantize(m, *given, scale_layout=layout)[1] for m in x])
    return codes, scale, dequantize(codes, linear, *given, dtype=torch.float64)


def _formula(o, w):
    """o (Tq, G, K), w (G, R, K) in float64, one group at a time."""
    return torch.stack([o[:, g] @ w[g].T for g in range(len(w))], 1)


def _near(got, want, terms):
    """Sums of this many terms in float32, or in float64 where that is asked for, then one rounding at the store."""
    acc = torch.promote_types(got.dtype, torch.float32)
    eps = torch.finfo(acc).eps * (terms + 2) + torch.finfo(got.dtype).eps
    assert bool(((got.double() - want).abs() <= eps * (want.abs().max() if want.numel() else 1)).all())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 4),
    groups=st.integers(1, 3),
    rank=st.integers(0, 5),
    k=st.integers(0, 70),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    out=st.sampled_from((None, torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**20),
)
def test_plain_tensors_of_any_size(tokens, groups, rank, k, dtype, out, seed):
    gen = torch.Generator().manual_seed(seed)
    o = torch.randn(tokens, groups, k, generator=gen).to(dtype)
    w = torch.randn(groups, rank, k, generator=gen).to(dtype)
    out = torch.float64 if dtype == torch.float64 else out  # of float64 operands a float32 store has its own test
    got = op(o, w, dtype=out)
    assert got.dtype == (out or dtype) and got.shape == (tokens, groups, rank)
    _near(got, _formula(o.double(), w.double()), k)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(("format", "scaled"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_codes_stand_for_their_numbers(format, scaled, layout, dtype):
    go, gw = (torch.tensor(300.0), torch.tensor(500.0)) if scaled else (None, None)
    o, o_scale, o64 = _coded(torch.randn(3, 5, 160), format, layout, go)
    w, w_scale, w64 = _coded(torch.randn(3, 7, 160) / 12, format, layout, gw)
    o_scale = o_scale.transpose(0, 1).contiguous() if layout == "linear" else o_scale
    got = op(
        o.transpose(0, 1).contiguous(), w, o_scale, w_scale, go, gw, format=format, scale_layout=layout, dtype=dtype
    )
    assert got.dtype == (dtype or torch.float32)
    _near(got, _formula(o64.transpose(0, 1), w64), 160)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_takes_what_inverse_rope_fp4_returns(format, layout):
    tokens, heads, d, groups = 6, 4, 64, 2
    o, angle = torch.randn(tokens, heads, d), torch.rand(tokens, 8) * 6
    w, w_scale, w64 = _coded(torch.randn(groups, 9, heads // groups * d) / 11, format, layout)
    codes, scale = A.inverse_rope_fp4(o, angle.cos(), angle.sin(), groups=groups, format=format, scale_layout=layout)
    if layout == "linear":
        scale = scale.view(tokens, groups, -1)
    got = op(codes.view(tokens, groups, -1), w, scale, w_scale, format=format, scale_layout=layout)
    linear = A.inverse_rope_fp4(o, angle.cos(), angle.sin(), format=format)
    dequantize = A.nvfp4_dequantize if format == "nvfp4" else A.mxfp4_dequantize
    rotated = dequantize(*linear, dtype=torch.float64).view(tokens, groups, -1)
    _near(got, _formula(rotated, w64), heads // groups * d)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_float64_operands_are_summed_in_float64_whatever_the_store(out):
    o, w = torch.randn(4, 2, 99, dtype=torch.float64), torch.randn(2, 3, 99, dtype=torch.float64)
    assert torch.equal(op(o, w, dtype=out), op(o, w).to(out))


def test_a_group_sees_its_own_channels_only():
    o, w = torch.randn(4, 3, 32), torch.randn(3, 5, 32)
    want = op(o, w)
    o[:, 1] = torch.nan
    got = op(o, w)
    assert torch.equal(got[:, [0, 2]], want[:, [0, 2]]) and bool(got[:, 1].isnan().all())


def test_strided_operands():
    o, w = torch.randn(4, 3, 32), torch.randn(3, 5, 32)
    buffer = torch.full((3, 9, 40), torch.nan)
    view = buffer.transpose(0, 1)[2:6, :, 3:35]
    view.copy_(o)
    _near(op(view, w), _formula(o.double(), w.double()), 32)


def test_refusals_name_op_argument_found_and_accepted():
    def refused(kind, message, *args, **kwargs):
        with pytest.raises(kind, match=f"^grouped_output_projection: {message}"):
            op(*args, **kwargs)

    o, w = torch.randn(4, 2, 64), torch.randn(2, 5, 64)
    oc, wc = torch.zeros(4, 2, 32, dtype=torch.uint8), torch.zeros(2, 5, 32, dtype=torch.uint8)
    so, sw = torch.zeros(4, 2, 4, dtype=torch.uint8), torch.zeros(2, 5, 4, dtype=torch.uint8)
    refused(
        ValueError, r"wo_a must be \(G, R, Ko\), got shape \(3, 5, 64\): G=3, but o has G=2", o, torch.randn(3, 5, 64)
    )
    refused(TypeError, "o is u8, accepted with format 'none': f32", oc, wc)
    refused(TypeError, "o is f32, accepted with format 'nvfp4': u8", o, w, so, sw, format="nvfp4")
    refused(TypeError, "wo_a is u8, accepted with format 'none': f32", o[..., :32].contiguous(), wc)
    refused(ValueError, "format 'none' takes no scales, .* need o_scale and wo_scale", oc, wc, so, format="nvfp4")
    refused(ValueError, "format 'none' takes no scales", o, w, so, sw)
    refused(ValueError, r"o_scale and wo_scale must be .*Ks=4", oc, wc, so, sw, format="mxfp4")
    refused(
        ValueError,
        r"o_scale and wo_scale must be .*PTq=4",
        oc,
        wc,
        so.transpose(0, 1).contiguous(),
        sw,
        format="nvfp4",
        scale_layout="128x4",
    )
    refused(ValueError, "scale_layout must be 'linear' with format 'none'", o, w, scale_layout="128x4")
    refused(
        ValueError, "K = 2 \\* Ko must be a multiple of the block", oc[..., :4], wc[..., :4], so, sw, format="nvfp4"
    )
    refused(
        ValueError,
        "o_global and wo_global are accepted with format 'nvfp4' only",
        oc,
        wc,
        so[..., :2],
        sw[..., :2],
        torch.ones(()),
        format="mxfp4",
    )
    refused(
        ValueError,
        "wo_global is nan, accepted: finite numbers above 0",
        oc,
        wc,
        so,
        sw,
        None,
        torch.tensor(torch.nan),
        format="nvfp4",
    )
    refused(
        TypeError,
        "o_scale is f8e8m0, accepted with format 'nvfp4': u8, f8e4m3",
        oc,
        wc,
        so.view(torch.float8_e8m0fnu),
        sw,
        format="nvfp4",
    )
    refused(TypeError, "dtype is i64, accepted: f32, bf16, f16, f64", o, w, dtype=torch.int64)
    refused(ValueError, "format is 'fp8', accepted: none, nvfp4, mxfp4", o, w, format="fp8")
