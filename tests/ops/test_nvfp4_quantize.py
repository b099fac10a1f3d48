"""nvfp4_quantize: the op against ml_dtypes' casts, both scale layouts, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

quantize = torch.ops.attnkit.nvfp4_quantize
dequantize = torch.ops.attnkit.nvfp4_dequantize
BLOCK = 16


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


def _oracle(x, gs):
    """The contract in numpy: float32 arithmetic, roundings to E4M3 and E2M1 by ml_dtypes."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    one = np.float32(1 if gs is None else gs)
    scale = np.minimum(np.abs(blocks).max(-1, initial=0) / np.float32(6) * one, 448).astype(ml_dtypes.float8_e4m3fn)
    sf = scale.astype(np.float32)
    r = np.divide(one, sf, out=np.zeros_like(sf), where=sf != 0)
    element = np.clip(blocks * r[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return element.view(np.uint8).reshape(x.shape), scale.view(np.uint8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    blocks=st.integers(0, 5),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    gs=st.none() | st.floats(0.125, 5000, width=32),
    seed=st.integers(0, 2**20),
)
def test_equals_the_definition_in_ml_dtypes(batch, blocks, dtype, gs, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, blocks * BLOCK, generator=gen)
    x = (x * torch.exp2(torch.randint(-6, 7, x.shape[:-1] + (1,), generator=gen).float())).to(dtype)
    codes, scale = quantize(x, None if gs is None else torch.tensor(gs))
    want_codes, want_scale = _oracle(x.float().numpy(), gs)
    assert codes.shape == (*batch, blocks * BLOCK // 2) and scale.shape == (*batch, blocks)
    assert np.array_equal(_unpack(codes).numpy(), want_codes)
    assert np.array_equal(scale.numpy(), want_scale)


def test_requantizing_what_was_stored_changes_nothing():
    """The largest element of a block is stored as 6 and asks for the same scale again."""
    x = torch.randn(64, 128)
    gs = 448 * 6 / x.abs().max()
    codes, scale = quantize(x, gs)
    again = quantize(dequantize(codes, scale, gs), gs)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_the_error_is_within_half_a_step_of_the_block():
    """A step is at most 2 scales wide; the scale itself may be 1/16 too small, which clips at 6 scales."""
    x = torch.randn(32, 256)
    codes, scale = quantize(x)
    error = (dequantize(codes, scale) - x).abs().reshape(32, 16, 16)
    amax = x.reshape(32, 16, 16).abs().amax(-1, keepdim=True)
    assert bool((error <= amax / 6 * (1 + 2**-4) + 1e-6).all())


def test_a_global_scale_reaches_blocks_too_small_without_it():
    x = torch.full((1, 16), 1e-4)
    assert not bool(dequantize(*quantize(x)).any())
    gs = torch.tensor(448 * 6 / 1e-4)
    assert torch.allclose(dequantize(*quantize(x, gs), gs), x, rtol=1e-6, atol=0)


def test_nan_and_infinity_saturate():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
    codes, scale = quantize(x)
    assert scale.tolist() == [[0x7E]] and _unpack(codes)[0, :4].tolist()[1:] == [7, 15, 0]
    x[0, 1:3] = 0
    assert _unpack(quantize(x)[0])[0, 0] == 7


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
    with pytest.raises(ValueError, match=r"nvfp4_quantize: K, the last axis of x, must be a multiple of 16 \(got K=24"):
        quantize(torch.randn(2, 24))
    with pytest.raises(ValueError, match=r"nvfp4_quantize: x must be \(\.\.\., K\), got shape \(\)"):
        quantize(torch.tensor(1.0))
    with pytest.raises(TypeError, match="nvfp4_quantize: x is u8, accepted: f32, bf16, f16, f64"):
        quantize(x.byte())
    with pytest.raises(ValueError, match="nvfp4_quantize: scale_layout is 'swizzled', accepted: linear, 128x4"):
        quantize(x, scale_layout="swizzled")
    with pytest.raises(ValueError, match=r"nvfp4_quantize: global_scale must be \(\), got shape \(1,\)"):
        quantize(x, torch.ones(1))
    for bad, found in ((-1.0, "-1"), (-torch.inf, "-inf"), (2.0**116, "8.30767e")):
        with pytest.raises(
            ValueError, match=f"nvfp4_quantize: global_scale is {found}.*accepted: finite numbers above 0"
        ):
            quantize(x, torch.tensor(bad))
