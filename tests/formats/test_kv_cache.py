"""Rows of the key-value cache: their bytes, part by part, and what comes back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import e2m1, fp8, kv_cache, mxfp4, nvfp4

ENCODED = ("fp8", "nvfp4", "mxfp4")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
D, ROPE = 512, 64


def sample(rows: int, head_dim: int = D, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, head_dim, generator=gen)
    magnitude = torch.randint(-4, 5, (rows, head_dim // 64), generator=gen)
    return x * 2.0 ** magnitude.repeat_interleave(64, -1)


def test_row_sizes_and_offsets():
    assert {f: kv_cache.row_bytes(f, D, ROPE) for f in kv_cache.FORMATS} == {
        "none": 512,
        "fp8": 584,
        "nvfp4": 380,
        "mxfp4": 368,
    }
    assert kv_cache.row_layout("fp8", D, ROPE) == (448, 576, 583, 584)
    assert kv_cache.row_layout("nvfp4", D, ROPE) == (224, 352, 380, 380)
    assert kv_cache.row_layout("mxfp4", D, ROPE) == (224, 352, 366, 368)
    assert kv_cache.row_layout("fp8", 128, 0) == (128, 128, 130, 132)
    assert kv_cache.row_layout("nvfp4", 64, 64) == (0, 128, 128, 128)
    for head_dim, rope_dim in ((64, 0), (128, 64), (192, 64), (256, 0), (576, 64)):
        for format in ENCODED:
            layout = kv_cache.row_layout(format, head_dim, rope_dim)
            assert layout.size % 4 == 0 and 0 <= layout.size - layout.end < 4


def test_fp8_row_against_numpy():
    """The published 584-byte row: 448 E4M3, 64 bfloat16, 7 exponents, 1 zero."""
    x = sample(9)
    x[0, :64] = 0.0
    rows = kv_cache.encode_rows(x, "fp8", ROPE).numpy()
    wide = x[:, :448].double().numpy().reshape(9, 7, 64)
    powers = 2.0 ** np.arange(-127.0, 128.0)
    byte = (np.abs(wide).max(-1)[..., None] > 448 * powers).sum(-1)  # (9, 7)
    codes = (wide / powers[byte][..., None]).astype(ml_dtypes.float8_e4m3fn)
    assert rows[:, :448].tolist() == codes.view(np.uint8).reshape(9, 448).tolist()
    rope = x[:, 448:].numpy().astype(ml_dtypes.bfloat16).view(np.uint8)
    assert rows[:, 448:576].tolist() == rope.tolist()
    assert rows[:, 576:583].tolist() == byte.tolist()
    assert not rows[:, 583].any()


@pytest.mark.parametrize("format", ENCODED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_row(format, dtype):
    x = sample(5).to(dtype)
    gs = nvfp4.global_scale(x) if format == "nvfp4" else None
    rows = kv_cache.encode_rows(x, format, ROPE, gs)
    assert rows.dtype == torch.uint8 and rows.shape == (5, kv_cache.row_bytes(format, D, ROPE))
    nope = x[:, :448]
    if format == "fp8":
        codes, scale = fp8.quantize(nope, block=64)
        values = fp8.dequantize(codes, scale, block=64, dtype=torch.float64)
    elif format == "nvfp4":
        codes, scale = nvfp4.quantize(nope, gs)
        values = nvfp4.dequantize(codes, scale, gs, torch.float64)
    else:
        codes, scale = mxfp4.quantize(nope)
        values = mxfp4.dequantize(codes, scale, torch.float64)
    rope = x[:, 448:].to(torch.bfloat16)
    little = rope.view(torch.int16).numpy().astype("<i2").tobytes()
    layout = kv_cache.row_layout(format, D, ROPE)
    assert torch.equal(rows[:, : layout.rope], codes)
    assert rows[:, layout.rope : layout.scales].numpy().tobytes() == little
    assert torch.equal(rows[:, layout.scales : layout.end], scale)
    assert not rows[:, layout.end :].any()
    back = kv_cache.decode_rows(rows, format, D, ROPE, gs, torch.float64)
    assert torch.equal(back, torch.cat((values, rope.double()), dim=-1))
    default = kv_cache.decode_rows(rows, format, D, ROPE, gs)
    assert default.dtype == torch.bfloat16
    narrow = kv_cache.decode_rows(rows, format, D, ROPE, gs, torch.float32)
    assert torch.equal(default, narrow.to(torch.bfloat16))


@pytest.mark.parametrize("format", ENCODED)
def test_rows_without_a_rope_part(format):
    x = sample(3)[:, :448]
    whole = kv_cache.decode_rows(kv_cache.encode_rows(sample(3), format, ROPE), format, D, ROPE)
    alone = kv_cache.decode_rows(kv_cache.encode_rows(x, format, 0), format, 448, 0)
    assert torch.equal(alone, whole[:, :448])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sampled_from(ENCODED), st.integers(0, 2**31), st.integers(-8, 8), st.booleans())
def test_rows_are_a_fixed_point(format, seed, shift, scaled):
    """Decoded in bfloat16, encoded again: the same row (from the second encoding on with UE8M0)."""
    x = sample(3, seed=seed % 997) * 2.0**shift
    gs = nvfp4.global_scale(x) if format == "nvfp4" and scaled else None
    rows = kv_cache.encode_rows(x, format, ROPE, gs)
    first = kv_cache.decode_rows(rows, format, D, ROPE, gs)
    again = kv_cache.encode_rows(first, format, ROPE, gs)
    twice = kv_cache.decode_rows(again, format, D, ROPE, gs)
    if format == "nvfp4":
        # A subnormal block scale has too few bits to be found again; none may hide the others.
        scales = rows[:, 352:380]
        keep = (scales >= 8) | (scales == 0)
        assert torch.equal(again[:, 352:380][keep], scales[keep])
        channels = torch.cat((keep.repeat_interleave(16, -1), torch.ones(3, ROPE) == 1), dim=-1)
        assert torch.equal(twice[channels], first[channels])
    else:
        assert torch.equal(twice, first)
        assert torch.equal(kv_cache.encode_rows(twice, format, ROPE, gs), again)


def test_format_none_copies():
    x = sample(4).to(torch.float16)
    rows = kv_cache.encode_rows(x, "none", ROPE)
    assert rows.dtype == torch.float16 and torch.equal(rows, x)
    back = kv_cache.decode_rows(rows, "none", D, ROPE)
    assert back.dtype == torch.float16 and torch.equal(back, x)
    rows.zero_()
    assert back.any() and x.any()
    wide = kv_cache.decode_rows(x, "none", D, ROPE, dtype=torch.float64)
    assert torch.equal(wide, x.double())


@pytest.mark.parametrize("format", ENCODED)
def test_strided_offset_and_empty_rows(format):
    x = sample(6)
    rows = kv_cache.encode_rows(x, format, ROPE)
    size = rows.shape[-1]
    assert torch.equal(kv_cache.encode_rows(x.T.contiguous().T[::2], format, ROPE), rows[::2])
    expected = kv_cache.decode_rows(rows, format, D, ROPE)
    # One byte in, so that no part of a row is aligned for its type.
    cache = torch.zeros(1 + 2 * rows.numel(), dtype=torch.uint8)
    window = cache[1:].view(6, 2 * size)[:, :size]
    window.copy_(rows)
    assert torch.equal(kv_cache.decode_rows(window, format, D, ROPE), expected)
    assert torch.equal(kv_cache.decode_rows(window[2:3], format, D, ROPE), expected[2:3])
    assert torch.equal(kv_cache.decode_rows(window[2], format, D, ROPE), expected[2])
    assert kv_cache.encode_rows(x[:0], format, ROPE).shape == (0, size)
    assert kv_cache.decode_rows(rows[:0], format, D, ROPE).shape == (0, D)


def test_special_values():
    x = torch.zeros(1, D)
    x[0, 0], x[0, 448], x[0, 449] = -0.0, float("nan"), -float("inf")
    x[0, 64] = float("inf")
    for format in ENCODED:
        rows = kv_cache.encode_rows(x, format, ROPE)
        back = kv_cache.decode_rows(rows, format, D, ROPE, dtype=torch.float32)[0]
        assert torch.signbit(back[0]) and not back[:64].any() and not back[65:448].any()
        # The scale of an infinity lets it come back; NVFP4 has none such, and gives its largest.
        assert back[64] == (2688.0 if format == "nvfp4" else float("inf"))
        assert back[448].isnan() and back[449] == -float("inf")
    assert e2m1.VALUES[kv_cache.encode_rows(x, "mxfp4", ROPE)[0, 0].item() & 15] == 0


def test_refusals():
    x = sample(2)
    message = r"head_dim 512 - rope_dim 60 = 452 NoPE channels; accepted by format 'fp8': multiples of 64"
    with pytest.raises(ValueError, match=message):
        kv_cache.encode_rows(x, "fp8", 60)
    with pytest.raises(ValueError, match="452 NoPE channels; .* 'nvfp4': multiples of 16"):
        kv_cache.row_bytes("nvfp4", 512, 60)
    with pytest.raises(ValueError, match="rope_dim is 513; accepted: 0 to head_dim, here 512"):
        kv_cache.row_bytes("none", 512, 513)
    with pytest.raises(ValueError, match="format is 'int8'; accepted: 'none', 'fp8', 'nvfp4'"):
        kv_cache.encode_rows(x, "int8", ROPE)
    with pytest.raises(ValueError, match="global_scale given with format 'fp8'; accepted: 'nvfp4'"):
        kv_cache.encode_rows(x, "fp8", ROPE, torch.ones(()))
    with pytest.raises(ValueError, match=r"rows has shape \(2, 512\); accepted: \(..., 584\)"):
        kv_cache.decode_rows(x, "fp8", D, ROPE)
    with pytest.raises(TypeError, match="decode_rows: rows is torch.float32; accepted: torch.uint8"):
        kv_cache.decode_rows(torch.zeros(2, 584), "fp8", D, ROPE)
    with pytest.raises(TypeError, match="encode_rows: kv is torch.int64"):
        kv_cache.encode_rows(x.long(), "mxfp4", ROPE)
