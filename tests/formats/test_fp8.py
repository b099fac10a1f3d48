"""E4M3 and UE8M0 against ml_dtypes and torch's own casts, exhaustively; blocks of both."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import fp8

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
NAN_CODES = (0x7F, 0xFF)


def ml_e4m3(values: torch.Tensor) -> torch.Tensor:
    codes = values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(codes.copy())


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN equal to any other."""
    nan = a.isnan()
    signs = torch.equal(torch.signbit(a)[~nan], torch.signbit(b)[~nan])
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan]) and signs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e4m3_decodes_all_256_bytes(dtype):
    got = fp8.e4m3_decode(BYTES, dtype)
    theirs = BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert got.dtype == dtype
    assert same_values(got.double(), torch.from_numpy(theirs))
    assert same_values(got, BYTES.view(torch.float8_e4m3fn).to(dtype))
    number = ~got.isnan()
    assert torch.equal(fp8.e4m3_encode(got)[number], BYTES[number])
    assert BYTES[~number].tolist() == list(NAN_CODES)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
def test_e4m3_encodes_every_midpoint_and_its_neighbours(dtype):
    decoded = fp8.e4m3_decode(BYTES[:127], torch.float64)  # 0 to 448.
    mid = (decoded[:-1] + decoded[1:]) / 2
    ends = torch.tensor([456.0, 464.0], dtype=torch.float64)  # 464 is where 480 would begin.
    at = torch.cat((decoded, mid, ends)).to(dtype)
    below = torch.nextafter(at, torch.full_like(at, -1.0))
    above = torch.nextafter(at, torch.full_like(at, 1e9))
    x = torch.cat((at, below, above))
    x = torch.cat((x, -x))
    # ml_dtypes goes through float32: hand it float64 only where that is exact.
    exact = x.float().to(dtype) == x
    saturates = x.abs() > 448
    ours = fp8.e4m3_encode(x)
    check = exact & ~saturates
    assert torch.equal(ours[check], ml_e4m3(x[check]))
    assert torch.equal(ours & 0x7F, fp8.e4m3_encode(x.abs()))
    assert set(ours[saturates].tolist()) == {0x7E, 0xFE}
    # The even byte is the middle's; one step either side decides for the nearest.
    i = torch.arange(126)
    assert torch.equal(fp8.e4m3_encode(mid.to(dtype)).int(), i + i % 2)
    assert torch.equal(fp8.e4m3_encode(torch.nextafter(mid.to(dtype), decoded[:-1].to(dtype))).int(), i)
    assert torch.equal(fp8.e4m3_encode(torch.nextafter(mid.to(dtype), decoded[1:].to(dtype))).int(), i + 1)


def test_e4m3_encodes_every_half_precision_number():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        ours, number = fp8.e4m3_encode(x), ~x.isnan()
        within = x.abs() <= 448
        assert torch.equal(ours[within], ml_e4m3(x[within].float()))
        clamped = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(ours[number], clamped[number])
        assert set(ours[~number].tolist()) == {0x7F}


def test_e4m3_where_ml_dtypes_and_torch_differ_by_intent():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([464.0, 465.0, 1e9, inf, -inf, nan, -nan])
    assert fp8.e4m3_encode(x).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F]
    # ml_dtypes turns what rounds beyond 448 into NaN and keeps the sign of NaN.
    assert ml_e4m3(x).tolist() == [0x7E, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF]
    # torch keeps the sign of NaN too; whether it saturates depends on its version.
    assert x.to(torch.float8_e4m3fn).view(torch.uint8)[5:].tolist() == [0x7F, 0xFF]
    # A float64 just past a midpoint is rounded once here, twice in ml_dtypes.
    past = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert fp8.e4m3_decode(fp8.e4m3_encode(past)).item() == 1.125
    assert fp8.e4m3_decode(ml_e4m3(past)).item() == 1.0


def test_ue8m0_decodes_all_256_bytes():
    theirs = torch.from_numpy(BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    assert same_values(fp8.ue8m0_decode(BYTES, torch.float64), theirs)
    assert same_values(fp8.ue8m0_decode(BYTES), BYTES.view(torch.float8_e8m0fnu).float())
    assert same_values(fp8.ue8m0_decode(BYTES, torch.bfloat16).double(), theirs)
    half = fp8.ue8m0_decode(BYTES, torch.float16).double()
    assert same_values(half[103:143], theirs[103:143])  # 2^-24 to 2^15, the range of float16.
    inverse = fp8.ue8m0_reciprocal(BYTES, torch.float64)
    assert torch.equal((inverse * theirs)[:255], torch.ones(255, dtype=torch.float64))
    assert inverse[255].isnan()


def exact_byte(x: float, limit: float, rounding: str) -> int:
    """The definition, in rational numbers, by trying every byte."""
    if x == 0:
        return 0
    if rounding == "ceil":
        for byte in range(255):
            if Fraction(x) <= Fraction(limit) * Fraction(2) ** (byte - 127):
                return byte
        return 254
    floors = [k for k in range(-1100, 1100) if Fraction(2) ** k <= Fraction(x)]
    emax = math.frexp(limit)[1] - 1
    return min(max(floors[-1] - emax + 127, 0), 254)


@pytest.mark.parametrize("rounding", fp8.ROUNDINGS)
@pytest.mark.parametrize("limit", (1.0, 6.0, 448.0, 57344.0))
def test_ue8m0_encode_is_the_exact_power(limit, rounding):
    powers = [limit * 2.0**k for k in (-150, -136, -130, -128, -127, -126, -20, -1, 0, 1, 60)]
    powers += [2.0**k for k in (-149, -140, -127, -126, -8, 0, 9, 127)]
    at = torch.tensor([p for p in powers if 0 < p < 3.4e38])
    x = torch.cat((at, torch.nextafter(at, 0 * at), torch.nextafter(at, 0 * at + 3.4e38)))
    x = torch.cat((x, torch.zeros(1), torch.tensor([torch.finfo(torch.float32).max])))
    expected = [exact_byte(v, limit, rounding) for v in x.tolist()]
    assert fp8.ue8m0_encode(x, limit, rounding).tolist() == expected
    assert fp8.ue8m0_encode(x.double(), limit, rounding).tolist() == expected
    assert fp8.ue8m0_encode(-x, limit, rounding).tolist() == expected


@pytest.mark.parametrize("limit,top", ((6.0, 2), (448.0, 8)))
def test_ue8m0_encode_is_the_documented_bit_arithmetic(limit, top):
    """What a kernel computes from the bits of a float32 amax, infinity and subnormals included."""
    gen = torch.Generator().manual_seed(2)
    bits = torch.randint(0, 0x7F800001, (200_000,), generator=gen, dtype=torch.int64)
    edges = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000])
    bits = torch.cat((bits, edges)).to(torch.int32)
    x = bits.view(torch.float32)
    limit_fraction = np.float32(limit).view(np.int32).item() & 0x7FFFFF
    floor = (bits >> 23) - top
    ceil = floor + ((bits & 0x7FFFFF) > limit_fraction)
    assert torch.equal(fp8.ue8m0_encode(x, limit, "floor").int(), floor.clamp(0, 254))
    assert torch.equal(fp8.ue8m0_encode(x, limit, "ceil").int(), ceil.clamp(0, 254))
    # A kernel that divides in float32 and rounds the exponent of the quotient up agrees.
    finite = x.isfinite()
    quotient = (x / torch.full_like(x, limit)).view(torch.int32)
    divided = (quotient >> 23) + ((quotient & 0x7FFFFF) > 0)
    normal = finite & ((quotient >> 23) > 0)
    assert torch.equal(fp8.ue8m0_encode(x, limit, "ceil").int()[normal], divided[normal])


def test_ue8m0_encode_nan_and_infinity():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    for dtype in DTYPES:
        assert fp8.ue8m0_encode(x.to(dtype), 6.0).tolist() == [255, 253, 253, 0]
    assert fp8.ue8m0_encode(torch.tensor([1e300], dtype=torch.float64), 6.0).tolist() == [254]


@pytest.mark.parametrize("rounding", fp8.ROUNDINGS)
@pytest.mark.parametrize("block", (32, 64))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_against_numpy(dtype, block, rounding):
    gen = torch.Generator().manual_seed(3)
    magnitude = torch.randint(-12, 12, (6, 5, 1), generator=gen)
    x = torch.randn(6, 5, block, generator=gen) * 2.0**magnitude
    x[0, 0] = 0.0
    x[1, 1, 3] = -0.0
    x = x.flatten(1).to(dtype)  # (6, 5 * block)
    codes, scale = fp8.quantize(x, block=block, rounding=rounding)
    wide = x.double().numpy().reshape(6, 5, block)
    bytes_ = np.vectorize(lambda a: exact_byte(float(a), 448.0, rounding))(np.abs(wide).max(-1))
    assert scale.tolist() == bytes_.tolist()
    scaled = np.clip(wide / 2.0 ** (bytes_[..., None] - 127.0), -448, 448)
    expected = scaled.astype(ml_dtypes.float8_e4m3fn)
    assert codes.tolist() == expected.view(np.uint8).reshape(6, -1).tolist()
    decoded = expected.astype(np.float64) * 2.0 ** (bytes_[..., None] - 127.0)
    got = fp8.dequantize(codes, scale, block=block, dtype=torch.float64)
    assert got.tolist() == decoded.reshape(6, -1).tolist()
    for out in DTYPES:
        rounded = fp8.dequantize(codes, scale, block=block, dtype=out)
        assert rounded.dtype == out and torch.equal(rounded, got.to(out))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(-140, 120), st.sampled_from(fp8.ROUNDINGS))
def test_quantize_is_idempotent_in_value(seed, shift, rounding):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=gen, dtype=torch.float64).mul(2.0**shift).float()
    first = fp8.dequantize(*fp8.quantize(x, rounding=rounding))
    codes, scale = fp8.quantize(first, rounding=rounding)
    assert same_values(fp8.dequantize(codes, scale), first)
    # The bytes settle with the second encoding: an amax that rounds down to 224 halves its scale.
    again = fp8.quantize(fp8.dequantize(codes, scale), rounding=rounding)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_blocks_of_zeros_nan_and_infinity():
    x = torch.zeros(4, 32)
    x[0, 1] = -0.0
    x[1, 0], x[1, 1] = float("nan"), 448.0
    x[2, 0], x[2, 1] = -float("inf"), 1.0
    x[3] = float("nan")
    codes, scale = fp8.quantize(x)
    assert scale.flatten().tolist() == [0, 127, 247, 0]
    assert codes[0].tolist() == [0, 0x80] + [0] * 30
    assert codes[1].tolist() == [0x7F, 0x7E] + [0] * 30
    assert codes[2].tolist() == [0xFE] + [0] * 31
    assert set(codes[3].tolist()) == {0x7F}
    back = fp8.dequantize(codes, scale)
    assert same_values(back[0], x[0]) and back[1, 0].isnan() and back[1, 1] == 448
    assert fp8.dequantize(codes[:1], scale[:1] | 255).isnan().all()


def test_empty_and_strided():
    for shape in ((0, 64), (2, 0), (0, 0)):
        codes, scale = fp8.quantize(torch.zeros(shape))
        assert codes.shape == shape and scale.shape == (shape[0], shape[1] // 32)
        assert fp8.dequantize(codes, scale).shape == shape
    gen = torch.Generator().manual_seed(4)
    x = torch.randn(64, 6, generator=gen).T[::2]  # (3, 64)
    codes, scale = fp8.quantize(x)
    whole = fp8.quantize(x.contiguous())
    assert torch.equal(codes, whole[0]) and torch.equal(scale, whole[1])
    spread = codes.T.contiguous().T
    assert torch.equal(fp8.dequantize(spread, scale), fp8.dequantize(codes, scale))


def test_refusals():
    byte = torch.zeros(2, 32, dtype=torch.uint8)
    with pytest.raises(TypeError, match="fp8.e4m3_encode: x is torch.uint8"):
        fp8.e4m3_encode(byte)
    with pytest.raises(TypeError, match="fp8.e4m3_decode: codes is torch.float32"):
        fp8.e4m3_decode(torch.zeros(2))
    with pytest.raises(TypeError, match="fp8.ue8m0_decode: dtype is torch.int32"):
        fp8.ue8m0_decode(byte, torch.int32)
    with pytest.raises(ValueError, match="rounding is 'even'; accepted: 'ceil', 'floor'"):
        fp8.ue8m0_encode(torch.zeros(2), rounding="even")
    with pytest.raises(ValueError, match="limit is 0.0; accepted: positive finite"):
        fp8.ue8m0_encode(torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match="fp8.quantize: the last axis of x is 33; accepted: multiples of 32"):
        fp8.quantize(torch.zeros(2, 33))
    with pytest.raises(ValueError, match=r"scale has shape \(2, 2\); accepted: \(2, 1\), one per block"):
        fp8.dequantize(byte, torch.zeros(2, 2, dtype=torch.uint8))
