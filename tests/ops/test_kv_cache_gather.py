"""kv_cache_gather: what was written comes back, to the rounding of its format, and absent rows are zeros."""

from __future__ import annotations

import pytest
import torch

A = torch.ops.attnkit
op, write = A.kv_cache_gather, A.kv_cache_write
BYTES = {"fp8": 584, "nvfp4": 380, "mxfp4": 368}


def _written(kv, slot, format, gs=None, rows=9):
    cache = torch.full((rows, BYTES[format]), 0xA5, dtype=torch.uint8)
    write(kv, cache, slot, gs, format=format)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_rows_come_back_bit_for_bit(dtype):
    kv, slot = torch.randn(4, 33).to(dtype), torch.tensor([5, 0, 8, 2])
    cache = torch.full((9, 33), torch.nan, dtype=dtype)
    write(kv, cache, slot)
    assert torch.equal(op(cache, slot), kv) and op(cache, slot).dtype == dtype
    assert torch.equal(op(cache, slot, dtype=torch.float64), kv.double())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("format", BYTES)
def test_encoded_rows_come_back_to_the_rounding_of_the_format(format, scaled):
    gs = torch.tensor(448 * 6 / 5.0) if scaled and format == "nvfp4" else None
    kv, slot = torch.randn(6, 512).bfloat16(), torch.tensor([5, 0, 8, 2, 1, 7])
    out = op(_written(kv, slot, format, gs), slot, gs, format=format, head_dim=512)
    assert out.dtype == torch.float32
    assert torch.equal(out[:, 448:], kv[:, 448:].float()), "RoPE channels are stored in bfloat16"
    block = {"fp8": 64, "nvfp4": 16, "mxfp4": 32}[format]
    exact, got = (t[:, :448].double().unflatten(1, (-1, block)) for t in (kv, out))
    amax = exact.abs().amax(-1, keepdim=True)
    # Half a step: of E4M3 2^-4 of the number; of E2M1 a sixth of the top, 1/16 more where E4M3 rounded its scale, and
    # for a power-of-two scale, at most twice amax / 6, one whole scale. Without a global scale E4M3 is subnormal.
    allowed = {
        "fp8": exact.abs() / 16 + amax / 448 * 2**-9,
        "nvfp4": amax / 6 * (1 + 1 / 16) + (0 if scaled else 6 * 2**-10),
        "mxfp4": amax / 3,
    }[format]
    assert bool(((got - exact).abs() <= allowed).all())


@pytest.mark.parametrize("format", BYTES)
def test_writing_what_was_read_changes_no_number(format):
    """Except that the scale of a block may halve where its top fits: the numbers are the same."""
    gs = torch.tensor(500.0) if format == "nvfp4" else None
    slot = torch.arange(5)
    cache = _written(torch.randn(5, 512), slot, format, gs)
    first = op(cache, slot, gs, format=format, head_dim=512)
    again = op(_written(first, slot, format, gs), slot, gs, format=format, head_dim=512)
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", BYTES)
def test_absent_slots_are_zero_and_slots_may_repeat(format, dtype):
    cache = _written(torch.randn(3, 512), torch.tensor([4, 1, 8]), format)
    cache[0] = 0xFF  # nan wherever it is looked at
    for index in (torch.int32, torch.int64):
        out = op(cache, torch.tensor([8, -1, 4, 8], dtype=index), format=format, head_dim=512, dtype=dtype)
        one = op(cache, torch.tensor([8]), format=format, head_dim=512, dtype=dtype)
        assert out.dtype == (dtype or torch.float32)
        assert torch.equal(out[0], one[0]) and torch.equal(out[3], one[0])
        assert torch.equal(out[1], torch.zeros(512, dtype=out.dtype)) and not bool(out.isnan().any())


@pytest.mark.parametrize("format", ["none", *BYTES])
def test_no_slots_and_no_rows(format):
    cache = torch.zeros(0, 512) if format == "none" else torch.zeros(0, BYTES[format], dtype=torch.uint8)
    kwargs = dict(format=format, head_dim=512)
    assert op(cache, torch.zeros(0, dtype=torch.int32), **kwargs).shape == (0, 512)
    assert torch.equal(op(cache, torch.tensor([-1, -1]), **kwargs), torch.zeros(2, 512))


def test_rows_that_lie_apart():
    kv, slot = torch.randn(9, 512), torch.arange(9)
    cache = _written(kv, slot, "mxfp4")
    buffer = torch.full((9, 401), 0xFF, dtype=torch.uint8)
    buffer[:, 7 : 7 + 368] = cache
    want = op(cache, slot, format="mxfp4", head_dim=512)
    assert torch.equal(op(buffer[:, 7 : 7 + 368], slot, format="mxfp4", head_dim=512), want)


def test_the_result_is_not_a_view_of_the_cache():
    cache = torch.randn(3, 8)
    before = cache.clone()
    op(cache, torch.arange(3)).fill_(7)
    assert torch.equal(cache, before)


def test_refusals_name_op_argument_found_and_accepted():
    def refused(kind, message, *args, **kwargs):
        with pytest.raises(kind, match=f"^kv_cache_gather: {message}"):
            op(*args, **kwargs)

    cache, slot = torch.zeros(3, 368, dtype=torch.uint8), torch.tensor([0, 2])
    for bad in (3, -2):
        refused(
            ValueError,
            rf"slot\[0\] is {bad}, accepted: -1 to 2",
            cache,
            torch.tensor([bad]),
            format="mxfp4",
            head_dim=512,
        )
    refused(ValueError, "head_dim must be given with formats", cache, slot, format="mxfp4")
    refused(
        ValueError,
        "cache has rows of Rb=368, accepted with format 'fp8', D=512, rope_dim=64: 584",
        cache,
        slot,
        format="fp8",
        head_dim=512,
    )
    refused(ValueError, "rope_dim must be 0 to D .*D=32", cache, slot, format="mxfp4", head_dim=32)
    refused(ValueError, "rope_dim must be 0 to D .*D=-512", cache, slot, format="mxfp4", head_dim=-512)
    refused(TypeError, "cache is u8, accepted with format 'none': f32", cache, slot)
    refused(
        TypeError, "cache is f32, accepted with format 'nvfp4': u8", cache.float(), slot, format="nvfp4", head_dim=512
    )
    refused(
        ValueError,
        "cache has rows of Rb=368, accepted with format 'none', D=32, rope_dim=64: 32",
        cache.float(),
        slot,
        head_dim=32,
    )
    refused(
        ValueError,
        "global_scale is accepted with format 'nvfp4' only",
        cache,
        slot,
        torch.ones(()),
        format="mxfp4",
        head_dim=512,
    )
    refused(TypeError, "dtype is u8, accepted: f32, bf16, f16, f64", cache.float(), slot, dtype=torch.uint8)


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_numbers_at_the_end_of_float32_come_back_as_rounding_has_it(format):
    """The largest numbers round up to 2^128: infinite in float32, a number in float64; below that float32 is exact."""
    top = torch.finfo(torch.float32).max
    kv = torch.zeros(4, 512)
    kv[:, 0] = torch.tensor([top, -top, 2.0**127, torch.inf])
    slot = torch.arange(4)
    cache = _written(kv, slot, format)
    narrow, wide = (op(cache, slot, format=format, head_dim=512, dtype=d)[:, 0] for d in (None, torch.float64))
    assert narrow.tolist() == [torch.inf, -torch.inf, 2.0**127, torch.inf]
    assert wide[:3].tolist() == [2.0**128, -(2.0**128), 2.0**127] and 2.0**128 <= wide[3] < torch.inf
    assert torch.equal(wide.float(), narrow), "one rounding"
