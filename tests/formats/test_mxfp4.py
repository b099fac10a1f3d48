"""MXFP4 against its definition in float64, with the element type of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import e2m1, fp8, mxfp4

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def model(x: np.ndarray, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """(R, K) float64 to codes (R, K) and scale bytes (R, K/32); scales by search, not logarithm."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(-1)
    powers = 2.0 ** np.arange(-127.0, 128.0)  # (255,)
    if rounding == "ceil":
        byte = (amax[..., None] > 6 * powers).sum(-1)
    else:
        byte = np.maximum((amax[..., None] >= 4 * powers).sum(-1) - 1, 0)
    elements = (blocks / powers[byte][..., None]).astype(np.float32)
    codes = elements.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), byte


def sample(seed: int, low: int, high: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 3, 32, generator=gen, dtype=torch.float64)
    x *= 2.0 ** torch.randint(low, high, (16, 3, 1), generator=gen)
    x[0, 0] = 0.0
    x[1, 0, 5] = -0.0
    return x.flatten(1)  # (16, 96)


@pytest.mark.parametrize("rounding", fp8.ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_those_of_the_model(dtype, rounding, seed):
    low, high = (-20, 12) if dtype == torch.float16 else (-145, 122)
    x = sample(seed, low, high).float().to(dtype)
    packed, scale = mxfp4.quantize(x, rounding)
    codes, byte = model(x.double().numpy(), rounding)
    assert scale.tolist() == byte.tolist()
    assert e2m1.unpack(packed).tolist() == codes.tolist()
    # Scaling by a power of two is exact, so the dtype of the same values does not matter.
    for a, b in zip((packed, scale), mxfp4.quantize(x.double(), rounding), strict=True):
        assert torch.equal(a, b)
    number = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    number *= np.repeat(2.0 ** (byte - 127.0), 32, axis=-1)
    for out in DTYPES:
        got = mxfp4.dequantize(packed, scale, out)
        assert got.dtype == out
        assert torch.equal(got, torch.from_numpy(number).to(out))
    assert np.signbit(mxfp4.dequantize(packed, scale)[1, 5].item())


def test_scale_changes_exactly_at_its_limits():
    """One float beside 6 * 2^k ("ceil") and beside 2^k ("floor"), over all of float32's range."""
    for k in range(-120, 125):
        at = torch.tensor(2.0**k)
        x = torch.zeros(6, 32)
        for row, value in enumerate((6 * at, at)):
            x[3 * row, 0] = torch.nextafter(value, 0 * value)
            x[3 * row + 1, 0] = value
            x[3 * row + 2, 0] = torch.nextafter(value, value * 2)
        byte = 127 + k
        ceil = mxfp4.quantize(x, "ceil")[1].flatten().tolist()
        floor = mxfp4.quantize(x, "floor")[1].flatten().tolist()
        assert ceil[:3] == [byte, byte, byte + 1]
        assert floor[3:] == [byte - 3, byte - 2, byte - 2]


def test_floor_saturates_where_ceil_does_not():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 7.9, 0.5
    packed, scale = mxfp4.quantize(x, "floor")
    assert scale.item() == 127 and mxfp4.dequantize(packed, scale)[0, :2].tolist() == [6.0, 0.5]
    packed, scale = mxfp4.quantize(x)
    assert scale.item() == 128 and mxfp4.dequantize(packed, scale)[0, :2].tolist() == [8.0, 0.0]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(0, 2**31), st.integers(-140, 120), st.sampled_from(fp8.ROUNDINGS))
def test_idempotent(seed, shift, rounding):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=gen, dtype=torch.float64).mul(2.0**shift).float()
    packed, scale = mxfp4.quantize(x, rounding)
    first = mxfp4.dequantize(packed, scale)
    again, scale_again = mxfp4.quantize(first, rounding)
    assert torch.equal(mxfp4.dequantize(again, scale_again), first)
    # With "ceil" a block whose amax rounds to 3 halves its scale; then the bytes have settled.
    settled = packed, scale
    if rounding == "ceil":
        settled, (again, scale_again) = (again, scale_again), mxfp4.quantize(first, rounding)
    assert torch.equal(again, settled[0]) and torch.equal(scale_again, settled[1])


def test_zeros_nan_infinity_and_the_ends_of_the_range():
    x = torch.zeros(5, 32)
    x[0, 1] = -0.0
    x[1, :2] = torch.tensor([float("nan"), -6.0])
    x[2, :2] = torch.tensor([-float("inf"), 1.0])
    x[3] = float("nan")
    x[4, :2] = torch.tensor([2.0**-128, 2.0**-149])
    for rounding in fp8.ROUNDINGS:
        packed, scale = mxfp4.quantize(x, rounding)
        codes = e2m1.unpack(packed)
        assert scale.flatten().tolist() == [0, 127, 253, 0, 0]
        assert codes[0].tolist() == [0, 8] + [0] * 30
        assert codes[1].tolist() == [7, 15] + [0] * 30
        assert codes[2].tolist() == [15] + [0] * 31
        assert codes[3].tolist() == [7] * 32
        assert codes[4].tolist() == [1] + [0] * 31
        back = mxfp4.dequantize(packed, scale)
        assert not back[0].any() and torch.signbit(back[0]).tolist() == [False, True] + [False] * 30
        assert back[4, 0] == 2.0**-128
    assert mxfp4.dequantize(packed[:1], scale[:1] | 255).isnan().all()
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert mxfp4.quantize(largest)[1].item() == 253
    assert mxfp4.quantize(largest, "floor")[1].item() == 252


def test_empty_and_strided():
    for shape in ((0, 64), (2, 0), (3, 0, 32)):
        packed, scale = mxfp4.quantize(torch.zeros(shape))
        assert packed.shape == (*shape[:-1], shape[-1] // 2)
        assert scale.shape == (*shape[:-1], shape[-1] // 32)
        assert mxfp4.dequantize(packed, scale).shape == shape
    x = sample(5, -5, 5).T.contiguous().T[::2]
    packed, scale = mxfp4.quantize(x)
    whole, whole_scale = mxfp4.quantize(x.contiguous())
    assert torch.equal(packed, whole) and torch.equal(scale, whole_scale)
    spread, spread_scale = packed.T.contiguous().T, scale.T.contiguous().T
    assert torch.equal(mxfp4.dequantize(spread, spread_scale), mxfp4.dequantize(packed, scale))


def test_refusals():
    with pytest.raises(ValueError, match="mxfp4.quantize: the last axis of x is 48; accepted: multiples of 32"):
        mxfp4.quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="rounding is 'rceil'; accepted: 'ceil', 'floor'"):
        mxfp4.quantize(torch.zeros(2, 32), "rceil")
    with pytest.raises(TypeError, match="mxfp4.quantize: x is torch.uint8"):
        mxfp4.quantize(torch.zeros(2, 32, dtype=torch.uint8))
    byte = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale has shape \(1, 1\); accepted: \(2, 1\)"):
        mxfp4.dequantize(byte, byte[:1, :1])
    with pytest.raises(TypeError, match="mxfp4.dequantize: dtype is torch.float8_e4m3fn"):
        mxfp4.dequantize(byte, byte[:, :1], torch.float8_e4m3fn)
