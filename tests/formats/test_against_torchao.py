"""The same bytes as torchao, and the places where the two differ by intent.

torchao divides by a per-tensor scale, amax / (448 * 6); this package multiplies by its reciprocal.
"""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.formats import fp8, mxfp4, nvfp4, scale_layout

pytest.importorskip("torchao", reason="torchao, the other implementation, is not installed")
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor  # noqa: E402
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402

FLOOR = mx_tensor.ScaleCalculationMode.FLOOR
RCEIL = mx_tensor.ScaleCalculationMode.RCEIL
E4M3_EPS = 2.0**-6  # torchao's least NVFP4 block scale, the least normal E4M3.


def sample(dtype: torch.dtype, spread: int, seed: int = 0, k: int = 512) -> torch.Tensor:
    """(256, k), blocks of 32 differing by up to 2^spread either way."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(256, k // 32, 32, generator=gen)
    x *= 2.0 ** torch.randint(-spread, spread + 1, (256, k // 32, 1), generator=gen)
    return x.flatten(1).to(dtype)


def ao_nvfp4(x: torch.Tensor, per_tensor: torch.Tensor | None):
    scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16, per_tensor)
    return packed, scale.view(torch.uint8).reshape(len(x), -1)


def ao_mx(x: torch.Tensor, dtype: torch.dtype, mode):
    scale, codes = mx_tensor.to_mx(x, dtype, 32, mode)
    return codes.view(torch.uint8), scale.view(torch.uint8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_nvfp4_without_a_global_scale(dtype):
    x = sample(dtype, 4)
    packed, scale = nvfp4.quantize(x)
    theirs, their_scale = ao_nvfp4(x, None)
    normal = scale >= 8
    assert normal.float().mean() > 0.9
    # torchao lifts a smaller scale to 2^-6, and that of a zero block too.
    assert torch.equal(their_scale, scale.clamp(min=8))
    assert torch.equal(packed[normal.repeat_interleave(8, -1)], theirs[normal.repeat_interleave(8, -1)])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_nvfp4_with_a_global_scale_that_is_a_power_of_two(dtype):
    """Then 1 / per_tensor_scale is our global scale exactly, and every byte agrees."""
    x = sample(dtype, 2)
    x = (x / x.abs().max() * 2000).to(dtype)
    x[3, 7] = 2688.0 * 4
    gs = nvfp4.global_scale(x)
    per_tensor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    assert gs == 1 / per_tensor == 0.25
    packed, scale = nvfp4.quantize(x, gs)
    theirs, their_scale = ao_nvfp4(x, per_tensor)
    assert torch.equal(their_scale, scale.clamp(min=8)) and (scale >= 8).all()
    assert torch.equal(packed, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_with_any_global_scale(seed):
    """Their amax / 6 / (1 / gs) may fall on the other side of an E4M3 tie; nothing else differs."""
    x = sample(torch.float32, 2, seed)
    per_tensor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    gs = 1 / per_tensor  # Within one rounding of nvfp4.global_scale.
    assert (gs / nvfp4.global_scale(x) - 1).abs() <= torch.finfo(torch.float32).eps
    packed, scale = nvfp4.quantize(x, gs)
    theirs, their_scale = ao_nvfp4(x, per_tensor)
    same = scale == their_scale
    exact = x.double().unflatten(-1, (-1, 16)).abs().amax(-1) / 6 * gs.double()  # (256, 32)
    middle = (fp8.e4m3_decode(scale, torch.float64) + fp8.e4m3_decode(their_scale, torch.float64)) / 2
    assert ((exact / middle - 1).abs() <= 4 * torch.finfo(torch.float32).eps)[~same].all()
    assert (~same).sum() <= 2
    elements = same.repeat_interleave(8, -1)
    assert torch.equal(packed[elements], theirs[elements])


def test_nvfp4_dequantize():
    x = sample(torch.float32, 2)
    for per_tensor in (
        None,
        torch.tensor(0.25),
        nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max()),
    ):
        theirs, their_scale = ao_nvfp4(x, per_tensor)
        tensor = nvfp4_tensor.NVFP4Tensor(theirs, their_scale.view(torch.float8_e4m3fn), 16, torch.float32, per_tensor)
        gs = None if per_tensor is None else 1 / per_tensor
        ours = nvfp4.dequantize(theirs, their_scale, gs)
        # They multiply the two scales first: one more rounding, none for powers of two.
        exact = per_tensor is None or per_tensor == 0.25
        bound = 0.0 if exact else 2 * torch.finfo(torch.float32).eps
        assert ((ours - tensor.dequantize()).abs() <= bound * ours.abs()).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rounding,mode", (("floor", FLOOR), ("ceil", RCEIL)))
def test_mx_codes_and_scales(rounding, mode, dtype):
    x = sample(dtype, 14)
    packed, scale = mxfp4.quantize(x, rounding)
    theirs, their_scale = ao_mx(x, torch.float4_e2m1fn_x2, mode)
    assert torch.equal(scale, their_scale) and torch.equal(packed, theirs)
    codes, scale = fp8.quantize(x, rounding=rounding)
    theirs, their_scale = ao_mx(x, torch.float8_e4m3fn, mode)
    assert torch.equal(scale, their_scale) and torch.equal(codes, theirs)
    back = mx_tensor.to_dtype(
        theirs.view(torch.float8_e4m3fn), their_scale.view(torch.float8_e8m0fnu),
        torch.float8_e4m3fn, 32, torch.float32,
    )  # fmt: skip
    assert torch.equal(fp8.dequantize(codes, scale), back)


def test_mx_differs_where_a_logarithm_rounds():
    """One float above 6 * 2^100: log2 in float32 says 100, the exponent is 101."""
    x = torch.zeros(1, 32)
    x[0, 0] = torch.nextafter(torch.tensor(6 * 2.0**100), torch.tensor(torch.inf))
    assert mxfp4.quantize(x)[1].item() == 127 + 101
    assert ao_mx(x, torch.float4_e2m1fn_x2, RCEIL)[1].item() == 127 + 100


def test_mx_differs_at_the_least_scale_and_on_what_is_not_finite():
    x = torch.zeros(4, 32)
    x[1, 0] = 3 * 2.0**-127
    x[2, 0] = torch.inf
    x[3, 0], x[3, 1] = torch.nan, 6.0
    packed, scale = mxfp4.quantize(x)
    theirs, their_scale = ao_mx(x, torch.float4_e2m1fn_x2, RCEIL)
    assert scale.flatten().tolist() == [0, 0, 253, 127]
    # A NaN makes their scale NaN, an infinity the largest.
    assert their_scale.flatten().tolist() == [0, 0, 254, 255]
    assert torch.equal(packed[0], theirs[0])
    # Under scale byte 0 they multiply by 1 and lose the elements.
    assert packed[1, 0].item() == 5 and theirs[1, 0].item() == 0


@pytest.mark.parametrize("m,kb", ((1, 1), (128, 4), (200, 9), (300, 32)))
def test_swizzle(m, kb):
    gen = torch.Generator().manual_seed(m)
    scale = torch.randint(0, 256, (m, kb), generator=gen, dtype=torch.uint8)
    assert torch.equal(scale_layout.to_128x4(scale).flatten(), to_blocked(scale))
