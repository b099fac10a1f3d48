"""E2M1 against ml_dtypes and against the number line, exhaustively."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import e2m1

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
GRID = e2m1.VALUES[:8]


def theirs(values: torch.Tensor) -> list[int]:
    """The codes of ml_dtypes, (n,) of any dtype."""
    return values.double().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sixteen_codes(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    decoded = e2m1.decode(codes, dtype)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert decoded.dtype == dtype
    assert decoded.double().numpy().tobytes() == expected.tobytes()  # Signs of zero included.
    assert np.array(e2m1.VALUES).tobytes() == expected.tobytes()
    assert torch.equal(e2m1.encode(decoded), codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_even_and_their_neighbours_to_the_nearest(dtype):
    for (tie, even), sign in itertools.product(TIES.items(), (1.0, -1.0)):
        at = torch.tensor(sign * tie, dtype=dtype)
        toward = torch.tensor(sign * 7.0, dtype=dtype)
        points = torch.stack((torch.nextafter(at, 0 * at), at, torch.nextafter(at, toward)))
        below, above = max(v for v in GRID if v < tie), min(v for v in GRID if v > tie)
        got = e2m1.decode(e2m1.encode(points), torch.float64)
        assert got.tolist() == [sign * below, sign * even, sign * above]
        if dtype != torch.float64:  # Which ml_dtypes rounds to float32 first, onto the tie.
            assert e2m1.encode(points).tolist() == theirs(points)


def test_every_half_precision_number():
    """All 65536 patterns of float16 and of bfloat16, so every binade, subnormals and both zeros."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        number = ~x.isnan()
        assert e2m1.encode(x)[number].tolist() == theirs(x[number])
        assert set(e2m1.encode(x)[~number].tolist()) == {7}
        assert torch.equal(e2m1.encode(x), e2m1.encode(x.float()))
        assert torch.equal(e2m1.encode(x), e2m1.encode(x.double()))


def test_saturation_nan_and_signed_zero():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([6.0, 7.0, 1e30, inf, -inf, 0.0, -0.0, -0.1, nan, -nan])
    assert e2m1.encode(x).tolist() == [7, 7, 7, 7, 15, 0, 8, 8, 7, 7]
    # ml_dtypes agrees on all but NaN, for which it gives a zero: the instruction gives +6.
    assert theirs(x)[:8] == [7, 7, 7, 7, 15, 0, 8, 8]
    assert [code & 7 for code in theirs(x)[8:]] == [0, 0]


def test_all_pairs_of_a_byte():
    low, high = torch.arange(256) % 16, torch.arange(256) // 16
    codes = torch.stack((low, high), dim=-1).to(torch.uint8)  # (256, 2)
    packed = e2m1.pack(codes)
    assert packed.flatten().tolist() == list(range(256))
    assert torch.equal(e2m1.unpack(packed), codes)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2**31))
def test_pack_and_unpack_are_inverse(batch, pairs, seed):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (batch, 2 * pairs), generator=gen, dtype=torch.uint8)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)
    packed = torch.randint(0, 256, (batch, pairs), generator=gen, dtype=torch.uint8)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_strided_inputs():
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(12, 8, generator=gen).mul(3)
    assert torch.equal(e2m1.encode(x.T), e2m1.encode(x.T.contiguous()))
    codes = e2m1.encode(x).T[:, ::3]  # (8, 4)
    assert torch.equal(e2m1.pack(codes), e2m1.pack(codes.contiguous()))
    packed = e2m1.pack(codes).T
    assert torch.equal(e2m1.unpack(packed), e2m1.unpack(packed.contiguous()))


def test_refusals():
    with pytest.raises(TypeError, match=r"e2m1.encode: x is torch.int32; accepted: torch.float64"):
        e2m1.encode(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"e2m1.decode: codes is torch.int64"):
        e2m1.decode(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"e2m1.decode: dtype is torch.int8"):
        e2m1.decode(torch.zeros(2, dtype=torch.uint8), torch.int8)
    with pytest.raises(ValueError, match=r"last axis of codes is 3; accepted: multiples of 2"):
        e2m1.pack(torch.zeros(4, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"packed is 0-dimensional"):
        e2m1.unpack(torch.tensor(1, dtype=torch.uint8))
