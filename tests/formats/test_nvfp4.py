"""NVFP4 against its definition written again in numpy, with the element types of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import e2m1, fp8, nvfp4

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def model(x: np.ndarray, gs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(R, K) and 0-dim or (R, 1), of one dtype, to codes (R, K) and scale bytes (R, K/16)."""
    blocks = x.reshape(len(x), -1, 16)
    scaled = np.abs(blocks).max(-1) / x.dtype.type(6) * gs
    sf = np.minimum(scaled, 448).astype(ml_dtypes.float8_e4m3fn)
    wide = sf.astype(x.dtype)
    with np.errstate(divide="ignore", over="ignore"):
        r = np.where(wide == 0, x.dtype.type(0), gs / wide)
    codes = (blocks * r[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), sf.view(np.uint8)


def sample(seed: int, rows: int = 24, k: int = 96) -> torch.Tensor:
    """Normal numbers whose blocks differ by 2^20 in size, with a zero block and a negative zero."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k // 16, 16, generator=gen)
    x *= 2.0 ** torch.randint(-16, 5, (rows, k // 16, 1), generator=gen)
    x[0, 0] = 0.0
    x[1, 0, 5] = -0.0
    return x.flatten(1)


@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_those_of_the_model(dtype, scaled, seed):
    x = sample(seed).to(dtype)
    gs = nvfp4.global_scale(x) if scaled else None
    packed, scale = nvfp4.quantize(x, gs)
    codes, scale_bytes = model(x.float().numpy(), np.float32(gs.item() if scaled else 1.0))
    assert scale.tolist() == scale_bytes.tolist()
    assert e2m1.unpack(packed).tolist() == codes.tolist()
    if scaled:
        top = np.float32(x.float().abs().max().item())
        assert gs.item() == np.float32(2688) / top and gs.dtype == torch.float32
        assert scale.max().item() == 0x7E  # 448 is reached by the largest block.


def test_ties_of_elements_and_scales():
    """Blocks built so that x * r falls on every E2M1 tie and amax / 6 on E4M3 ties."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    ties[8:] *= -1
    for sf in (1.0, 0.5, 448.0, 2.0**-6, 2.0**-9):
        packed, scale = nvfp4.quantize(ties[None] * sf)
        assert fp8.e4m3_decode(scale).item() == sf
        even = [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]
        assert e2m1.unpack(packed)[0].tolist() == even
    for amax, byte in ((6 * 1.0625, 0x38), (6 * 1.1875, 0x3A), (3 * 2.0**-9, 0), (9 * 2.0**-9, 2)):
        x = torch.zeros(1, 16)
        x[0, 3] = amax
        assert nvfp4.quantize(x)[1].item() == byte


def test_the_order_of_operations_shows():
    """x * (gs / sf) is the definition; (x * gs) / sf would give other codes for these inputs."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    gs = torch.tensor(2688.0) / 3.7
    differ = 0
    for sf in torch.tensor([1.125, 1.25, 1.375, 1.625, 1.75, 1.875]):
        x = torch.zeros(5, 16)
        steps = 1 + torch.arange(-2, 3)[:, None] * 2.0**-23
        x[:, :7] = ties * sf / gs * steps  # At the ties, and one and two steps beside them.
        x[:, 7] = 6 * sf / gs
        packed, scale = nvfp4.quantize(x, gs)
        assert (fp8.e4m3_decode(scale) == sf).all()
        assert torch.equal(e2m1.unpack(packed), e2m1.encode(x * (gs / sf)))
        differ += int((e2m1.unpack(packed) != e2m1.encode((x * gs) / sf)).sum())
    assert differ > 0


def test_amax_is_divided_by_six():
    """Beside the ties of the block scale, a product with float32's 1/6 gives other scales."""
    bytes_ = torch.arange(8, 127, dtype=torch.uint8)
    values = fp8.e4m3_decode(bytes_)
    ties = (values[:-1] + values[1:]) / 2  # (118,)
    gs = torch.tensor(2688.0) / torch.tensor([[3.7], [0.11], [955.0]])  # (3, 1)
    amax = (6 * ties / gs).reshape(3, -1, 1) * (1 + torch.arange(-3, 4) * 2.0**-23)
    gs = gs[:, :, None].expand(amax.shape)  # (3, 118, 7)
    x = torch.nn.functional.pad(amax.unsqueeze(-1), (0, 15))
    scale = nvfp4.quantize(x, gs)[1].squeeze(-1).numpy()
    six, by = amax.numpy() / np.float32(6), gs.numpy()
    assert scale.tolist() == (six * by).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
    sixth = amax.numpy() * np.float32(1 / 6)
    assert (scale != (sixth * by).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).any()


def test_float64_rounds_only_where_the_definition_says():
    x = sample(7).double()
    gs = nvfp4.global_scale(x)
    assert gs.dtype == torch.float32 and gs == nvfp4.global_scale(x.float())
    for scale in (None, gs):
        packed, bytes_ = nvfp4.quantize(x, scale)
        codes, expected = model(x.numpy(), np.float64(1.0 if scale is None else scale.item()))
        assert bytes_.tolist() == expected.tolist()
        assert e2m1.unpack(packed).tolist() == codes.tolist()
    # With scales that are powers of two nothing rounds in float32, and the bytes agree.
    powers = torch.tensor(e2m1.VALUES).repeat(4, 2) * 2.0 ** torch.arange(-4, 0)[:, None]
    gs = torch.tensor(32.0)
    for a, b in zip(nvfp4.quantize(powers, gs), nvfp4.quantize(powers.double(), gs), strict=True):
        assert torch.equal(a, b)
    # Elsewhere a float32 rounding may cross a boundary: amax / 6 * gs a hair below an E4M3 tie.
    x32 = torch.zeros(1, 16)
    x32[0, 0] = 6 * (1.0625 + 2.0**-23)
    tie = torch.tensor(1 - 2.0**-24)
    narrow, wide = nvfp4.quantize(x32, tie)[1], nvfp4.quantize(x32.double(), tie)[1]
    assert (narrow.item(), wide.item()) == (0x38, 0x39)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_every_code_under_every_scale(dtype):
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None]  # (256, 1)
    packed = e2m1.pack(codes)
    elements = codes.numpy().view(ml_dtypes.float4_e2m1fn)
    for gs in (None, torch.tensor(37.3), torch.tensor(1e-5)):
        work = np.float64 if dtype == torch.float64 else np.float32
        sf = scale.numpy().view(ml_dtypes.float8_e4m3fn).astype(work)
        number = elements.astype(work) * sf / work(1.0 if gs is None else gs.item())
        got = nvfp4.dequantize(packed, scale, gs, dtype)
        expected = torch.from_numpy(number).to(dtype)
        assert got.dtype == dtype
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert torch.equal(torch.signbit(got)[:127], torch.signbit(expected)[:127])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(-60, 60), st.booleans())
def test_idempotent_under_normal_scales(seed, shift, scaled):
    """Where the block scale is at least 2^-6, or 0: a subnormal scale has too few bits for it."""
    x = sample(seed % 1000, rows=4) * 2.0**shift
    gs = nvfp4.global_scale(x) if scaled else None
    packed, scale = nvfp4.quantize(x, gs)
    again, scale_again = nvfp4.quantize(nvfp4.dequantize(packed, scale, gs), gs)
    keep = (scale >= 8) | (scale == 0)
    assert torch.equal(scale_again[keep], scale[keep])
    elements = keep.repeat_interleave(8, dim=-1)
    assert torch.equal(again[elements], packed[elements])


def test_error_is_within_half_a_step():
    """Every element of a block whose scale neither saturates nor is subnormal, in float64."""
    x = sample(11).double()
    gs = nvfp4.global_scale(x)
    packed, scale = nvfp4.quantize(x, gs)
    back = nvfp4.dequantize(packed, scale, gs, torch.float64)
    step = fp8.e4m3_decode(scale, torch.float64).repeat_interleave(16, -1) / gs.double()
    code = back.abs() / step
    # Half the wider gap beside a code; above 6 only the scale's own rounding, 6/16, is left.
    half_gap = torch.where(code < 2, 0.25, torch.where(code < 4, 0.5, 1.0)) * (1 + 1e-12)
    normal = (scale >= 8).repeat_interleave(16, -1)
    assert (((back - x).abs() <= half_gap * step) | ~normal).all()


def test_underflow_zeros_nan_and_infinity():
    x = torch.zeros(6, 16)
    x[0, 1] = -0.0
    x[1, :2] = torch.tensor([6 * 2.0**-10, -1e-3])  # The tie between scales 0 and 2^-9.
    x[2, :2] = torch.tensor([float("nan"), -6.0])
    x[3, :2] = torch.tensor([-float("inf"), 448.0])
    x[4] = float("nan")
    x[5, 0] = 1e-45
    packed, scale = nvfp4.quantize(x)
    codes = e2m1.unpack(packed)
    assert scale.flatten().tolist() == [0, 0, 0x38, 0x7E, 0, 0]
    assert codes[0].tolist() == [0, 8] + [0] * 14
    assert codes[1].tolist() == [0, 8] + [0] * 14
    assert codes[2].tolist() == [7, 15] + [0] * 14
    assert codes[3].tolist() == [15, 2] + [0] * 14
    assert codes[4].tolist() == [7] * 16
    assert codes[5].tolist() == [0] * 16
    back = nvfp4.dequantize(packed, scale)
    assert not back[[0, 1, 4, 5]].any() and back.isfinite().all()


def test_global_scale_edges():
    top = torch.finfo(torch.float32).max
    nan, inf = float("nan"), float("inf")
    cases = {0.0: 1.0, 2688.0: 1.0, 5.25: 512.0, inf: np.float32(2688) / np.float32(top)}
    for amax, expected in cases.items():
        x = torch.tensor([[0.0, -amax, nan]])
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert nvfp4.global_scale(x.to(dtype)).item() == expected
    assert nvfp4.global_scale(torch.tensor([1e-38])).item() == nvfp4.GLOBAL_SCALE_MAX
    assert nvfp4.global_scale(torch.zeros(0, 16)).item() == 1.0
    each = nvfp4.global_scale(torch.tensor([[[2688.0]], [[1344.0]], [[0.0]]]), batch_axes=1)
    assert each.tolist() == [1.0, 2.0, 1.0]
    assert nvfp4.global_scale(torch.zeros(3, 0, 2), batch_axes=1).tolist() == [1.0] * 3


def test_codes_do_not_depend_on_flushing_subnormals():
    """At the largest global scale, numbers below 2^-126 have zero codes, flushed or not."""
    gs = torch.tensor(nvfp4.GLOBAL_SCALE_MAX)
    x = torch.full((2, 16), 2.0**-126)
    x[:, 1:] = torch.nextafter(torch.tensor(2.0**-126), torch.tensor(0.0))
    x[1, 0] = 6 * 2.0**-124
    flushed = torch.where(x < 2.0**-126, 0.0, x)
    for a, b in zip(nvfp4.quantize(x, gs), nvfp4.quantize(flushed, gs), strict=True):
        assert torch.equal(a, b)


def test_global_scale_per_batch():
    x = torch.stack((sample(1), sample(2), sample(3)))  # (3, 24, 96)
    each = nvfp4.global_scale(x, batch_axes=1)
    packed, scale = nvfp4.quantize(x, each[:, None])
    back = nvfp4.dequantize(packed, scale, each[:, None])
    for i in range(3):
        one, one_scale = nvfp4.quantize(x[i], each[i])
        assert torch.equal(packed[i], one) and torch.equal(scale[i], one_scale)
        assert torch.equal(back[i], nvfp4.dequantize(one, one_scale, each[i]))


def test_empty_and_strided():
    for shape in ((0, 32), (2, 0), (3, 0, 16)):
        packed, scale = nvfp4.quantize(torch.zeros(shape))
        assert packed.shape == (*shape[:-1], shape[-1] // 2)
        assert scale.shape == (*shape[:-1], shape[-1] // 16)
        assert nvfp4.dequantize(packed, scale).shape == shape
    x = sample(5).T.contiguous().T[::2]
    packed, scale = nvfp4.quantize(x)
    whole, whole_scale = nvfp4.quantize(x.contiguous())
    assert torch.equal(packed, whole) and torch.equal(scale, whole_scale)
    spread, spread_scale = packed.T.contiguous().T, scale.T.contiguous().T
    assert torch.equal(nvfp4.dequantize(spread, spread_scale), nvfp4.dequantize(packed, scale))


def test_refusals():
    byte = torch.zeros(2, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="nvfp4.quantize: the last axis of x is 24; accepted: multiples of 16"):
        nvfp4.quantize(torch.zeros(2, 24))
    with pytest.raises(TypeError, match="nvfp4.quantize: x is torch.int32"):
        nvfp4.quantize(torch.zeros(2, 16, dtype=torch.int32))
    with pytest.raises(TypeError, match="global_scale is torch.bfloat16; accepted: torch.float32"):
        nvfp4.quantize(torch.zeros(2, 16), torch.ones((), dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"global_scale has batch axes \(3,\); .* to \(2,\)"):
        nvfp4.quantize(torch.zeros(2, 16), torch.ones(3))
    with pytest.raises(ValueError, match=r"scale has shape \(2, 2\); accepted: \(2, 1\)"):
        nvfp4.dequantize(byte, torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match="scale is torch.float8_e4m3fn; accepted: torch.uint8"):
        nvfp4.dequantize(byte, torch.zeros(2, 1, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="batch_axes is 2 for 2 axes; accepted: 0 to 1"):
        nvfp4.global_scale(torch.zeros(2, 16), batch_axes=2)
