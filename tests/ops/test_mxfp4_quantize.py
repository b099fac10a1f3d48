"""mxfp4_quantize: the op against ml_dtypes' casts, both scale layouts, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

quantize = torch.ops.attnkit.mxfp4_quantize
dequantize = torch.ops.attnkit.mxfp4_dequantize
BLOCK = 32


def _unpack(codes):
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _swizzle(scale):
    """The 128x4 order one byte at a time, from the formula of its documentation."""
    m, kb = scale.shape
    rows, cols = -(-m // 128) * 128, -(-kb // 4) * 4
    out = torch.zeros(rows * cols, dtype=torch.uint8)
    for i in range(m):
        for j in range(kb):
            at = ((i // 128) * (cols // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            out[at] = scale[i, j]
    return out.reshape(rows, cols)


def _oracle(x, rounding):
    """The contract in numpy: exponents by frexp and exact comparison, roundings to E2M1 by ml_dtypes."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).astype(np.float64)
    amax = np.abs(blocks).max(-1, initial=0)
    exponent = np.frexp(np.where(amax == 0, 1, amax))[1] - 1 - 2  # floor(log2 amax) - floor(log2 6)
    if rounding == "ceil":
        exponent = exponent + (amax > 6 * 2.0**exponent)
    byte = np.where(amax == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
    scaled = blocks / 2.0 ** (byte.astype(np.float64) - 127)[..., None]
    element = np.clip(scaled, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    return element.view(np.uint8).reshape(x.shape), byte


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    blocks=st.integers(0, 5),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    rounding=st.sampled_from(("ceil", "floor")),
    seed=st.integers(0, 2**20),
)
def test_equals_the_definition_in_ml_dtypes(batch, blocks, dtype, rounding, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, blocks * BLOCK, generator=gen)
    x = (x * torch.exp2(torch.randint(-6, 7, x.shape[:-1] + (1,), generator=gen).float())).to(dtype)
    codes, scale = quantize(x, rounding=rounding)
    want_codes, want_scale = _oracle(x.float().numpy(), rounding)
    assert codes.shape == (*batch, blocks * BLOCK // 2) and scale.shape == (*batch, blocks)
    assert np.array_equal(_unpack(codes).numpy(), want_codes)
    assert np.array_equal(scale.numpy(), want_scale)


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
def test_requantizing_what_was_stored_changes_no_number(rounding):
    """With "floor" no bit changes either; with "ceil" a block that tops at 3 scales may halve its scale, exactly."""
    x = torch.randn(64, 128)
    codes, scale = quantize(x, rounding=rounding)
    stored = dequantize(codes, scale)
    again = quantize(stored, rounding=rounding)
    assert torch.equal(dequantize(*again), stored)
    if rounding == "floor":
        assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_ceil_never_saturates_and_floor_may():
    x = torch.tensor([[7.0] + [0.0] * 31])
    assert dequantize(*quantize(x, rounding="floor"))[0, 0] == 6
    assert dequantize(*quantize(x, rounding="ceil"))[0, 0] == 8  # 3.5 scales of 2, a tie, to the even code
    many = torch.randn(100, 64)
    error = (dequantize(*quantize(many)) - many).abs().reshape(100, 2, 32)
    scale = torch.exp2(quantize(many)[1].float() - 127)[..., None]
    assert bool((error <= scale).all())  # half the widest step, which is 2 scales


def test_powers_of_two_commute_with_quantization():
    x = torch.randn(8, 64)
    codes, scale = quantize(x)
    other_codes, other_scale = quantize(x * 2.0**20)
    assert torch.equal(other_codes, codes) and torch.equal(other_scale, scale + 20)


@pytest.mark.parametrize("shape", [(1, BLOCK), (5, 3, 7 * BLOCK), (129, 5 * BLOCK), (BLOCK,), (0, BLOCK), (3, 0)])
def test_swizzled_scales_are_the_linear_ones_in_another_order(shape):
    x = torch.randn(shape)
    codes, scale = quantize(x)
    swizzled_codes, swizzled = quantize(x, scale_layout="128x4")
    assert torch.equal(codes, swizzled_codes)
    assert torch.equal(swizzled, _swizzle(scale.reshape(x.shape[:-1].numel(), x.shape[-1] // BLOCK)))
    assert torch.equal(dequantize(codes, swizzled, scale_layout="128x4"), dequantize(codes, scale))


def test_strided_input_and_its_neighbours_do_not_matter():
    x = torch.randn(4, 3, 2 * BLOCK)
    buffer = torch.full((3, 6, 2 * BLOCK + 9), torch.nan)
    view = buffer.transpose(0, 1)[1:5, :, 5 : 5 + 2 * BLOCK]
    view.copy_(x)
    assert all(torch.equal(a, b) for a, b in zip(quantize(view), quantize(x), strict=True))


def test_refusals_name_op_argument_found_and_accepted():
    x = torch.randn(2, 2 * BLOCK)
    with pytest.raises(ValueError, match=r"mxfp4_quantize: K, the last axis of x, must be a multiple of 32 \(got K=48"):
        quantize(torch.randn(2, 48))
    with pytest.raises(ValueError, match=r"mxfp4_quantize: x must be \(\.\.\., K\), got shape \(\)"):
        quantize(torch.tensor(1.0))
    with pytest.raises(TypeError, match="mxfp4_quantize: x is u8, accepted: f32, bf16, f16, f64"):
        quantize(x.byte())
    with pytest.raises(ValueError, match="mxfp4_quantize: scale_layout is 'swizzled', accepted: linear, 128x4"):
        quantize(x, scale_layout="swizzled")
    with pytest.raises(ValueError, match="mxfp4_quantize: rounding is 'nearest', accepted: ceil, floor"):
        quantize(x, rounding="nearest")
