"""nvfp4_dequantize: every code under every scale, both layouts, and what it refuses."""

from __future__ import annotations

import pytest
import torch

dequantize = torch.ops.attnkit.nvfp4_dequantize
BLOCK = 16
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))


def _all_codes():
    """256 rows, one per scale byte, each with all sixteen codes in order."""
    codes = (torch.arange(0, 16, 2) | torch.arange(1, 16, 2) << 4).to(torch.uint8)  # (8,)
    return codes.repeat(256, BLOCK // 16), torch.arange(256).to(torch.uint8)[:, None]


def test_every_code_under_every_scale():
    codes, scale = _all_codes()
    want = E2M1.repeat(256, BLOCK // 16) * scale.view(torch.float8_e4m3fn).float()
    assert torch.equal(dequantize(codes, scale).nan_to_num(nan=-1e30), want.nan_to_num(nan=-1e30))
    assert torch.equal(torch.signbit(dequantize(codes[:126], scale[:126])), torch.signbit(want[:126]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_rounding_to_the_dtype_asked_for(dtype):
    codes, scale = _all_codes()
    out = dequantize(codes, scale, dtype=dtype)
    assert out.dtype == dtype
    assert torch.equal(
        out.nan_to_num(nan=-1.0), dequantize(codes, scale, dtype=torch.float64).to(dtype).nan_to_num(nan=-1.0)
    )


def test_bytes_and_float8_scales_are_the_same():
    codes, scale = _all_codes()
    assert torch.equal(
        dequantize(codes, scale.view(torch.float8_e4m3fn)).nan_to_num(), dequantize(codes, scale).nan_to_num()
    )


def test_padding_of_swizzled_scales_is_not_looked_at():
    codes = torch.randint(0, 256, (2, 3, 5 * BLOCK // 2), dtype=torch.uint8)
    scale = torch.randint(100, 120, (2, 3, 5), dtype=torch.uint8)
    swizzled = torch.full((128 * 8,), 0xFF, dtype=torch.uint8)
    for i in range(6):
        for j in range(5):
            swizzled[(j // 4) * 512 + i * 16 + j % 4] = scale.reshape(6, 5)[i, j]
    got = dequantize(codes, swizzled.reshape(128, 8), scale_layout="128x4")
    assert torch.equal(got, dequantize(codes, scale))


def test_refusals_name_op_argument_found_and_accepted():
    codes, scale = torch.zeros(2, BLOCK, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(
        ValueError,
        match=r"nvfp4_dequantize: scale must be \(\.\.\., K/16\), got shape \(2, 3\): K=48, but codes has K=32",
    ):
        dequantize(codes, torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"nvfp4_dequantize: scale has batch axes \(3,\), but codes has \(2,\)"):
        dequantize(codes, torch.zeros(3, 2, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match=r"nvfp4_dequantize: scale in the 128x4 layout must be .* \(128, 4\) \(got .*Ms=128, Ks=8"
    ):
        dequantize(codes, torch.zeros(128, 8, dtype=torch.uint8), scale_layout="128x4")
    with pytest.raises(ValueError, match=r"nvfp4_dequantize: scale must be \(Ms, Ks\), got shape \(1, 128, 4\)"):
        dequantize(codes, torch.zeros(1, 128, 4, dtype=torch.uint8), scale_layout="128x4")
    with pytest.raises(TypeError, match="nvfp4_dequantize: scale is f8e8m0, accepted: u8, f8e4m3"):
        dequantize(codes, scale.view(torch.float8_e8m0fnu))
    with pytest.raises(TypeError, match="nvfp4_dequantize: codes is i32, accepted: u8"):
        dequantize(codes.int(), scale)
    with pytest.raises(TypeError, match="nvfp4_dequantize: dtype is i32, accepted: f32, bf16, f16, f64"):
        dequantize(codes, scale, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"nvfp4_dequantize: K, two numbers a byte of codes, must be a multiple of 16 \(got K=8"
    ):
        dequantize(codes[:, :4], torch.zeros(128, 4, dtype=torch.uint8), scale_layout="128x4")
    with pytest.raises(ValueError, match="nvfp4_dequantize: global_scale is -1, accepted: finite numbers above 0"):
        dequantize(codes, scale, torch.tensor(-1.0))


def test_the_global_scale_divides():
    codes, scale = _all_codes()
    gs = torch.tensor(3.0)
    want = dequantize(codes, scale).double() / 3
    assert torch.equal(dequantize(codes, scale, gs).nan_to_num(), want.float().nan_to_num())
