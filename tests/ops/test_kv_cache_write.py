"""kv_cache_write: the row bytes, the slots it touches and those it must not, and refusals that write nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

A = torch.ops.attnkit
op = A.kv_cache_write
FORMATS = ("none", "fp8", "nvfp4", "mxfp4")
BYTES = {"fp8": 584, "nvfp4": 380, "mxfp4": 368}  # of D 512 with rope_dim 64


def _cache(rows, format, d=512, gen=None):
    if format == "none":
        return torch.randn(rows, d, generator=gen)
    return torch.randint(0, 256, (rows, BYTES[format]), dtype=torch.uint8, generator=gen)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_is_codes_rope_scales_and_zeros(format, scaled):
    gs = torch.tensor(300.0) if scaled and format == "nvfp4" else None
    kv, cache = torch.randn(3, 512).bfloat16(), _cache(3, format)
    op(kv, cache, torch.arange(3), gs, format=format)
    nope = kv[:, :448].contiguous()
    codes, scale = A.nvfp4_quantize(nope, gs) if format == "nvfp4" else A.mxfp4_quantize(nope)
    assert torch.equal(cache[:, :224], codes)
    assert torch.equal(cache[:, 224:352], kv[:, 448:].contiguous().view(torch.uint8))
    assert torch.equal(cache[:, 352 : 352 + scale.shape[1]], scale)
    assert not bool(cache[:, 352 + scale.shape[1] :].any())


def test_an_fp8_row_is_codes_rope_scales_and_a_zero():
    kv, cache = torch.randn(3, 512) * torch.tensor((1.0, 100.0, 1e-3))[:, None], _cache(3, "fp8")
    op(kv, cache, torch.arange(3), format="fp8")
    scale = torch.exp2(cache[:, 576:583].float() - 127)  # (3, 7)
    blocks = kv[:, :448].reshape(3, 7, 64)
    top = blocks.abs().amax(-1) / scale
    assert bool(((top <= 448) & (top > 224)).all()), "the smallest power of two that does not overflow"
    want = (blocks / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).reshape(3, 448)
    assert torch.equal(cache[:, :448], want)
    assert torch.equal(cache[:, 448:576], kv[:, 448:].bfloat16().view(torch.uint8))
    assert not bool(cache[:, 583].any())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    format=st.sampled_from(FORMATS),
    slots=st.lists(st.integers(0, 8), max_size=6, unique=True),
    skip=st.lists(st.integers(0, 6), max_size=3),
    index=st.sampled_from((torch.int32, torch.int64)),
    gap=st.sampled_from((0, 3, 16)),
    seed=st.integers(0, 2**20),
)
def test_writes_its_slots_and_nothing_else(format, slots, skip, index, gap, seed):
    gen = torch.Generator().manual_seed(seed)
    for at in skip:
        slots.insert(min(at, len(slots)), -1)
    kv, row = torch.randn(len(slots), 512, generator=gen), BYTES.get(format, 512)
    buffer = torch.cat([_cache(9, format, gen=gen)] * 2, 1)[:, : row + gap].contiguous()
    want, cache = buffer.clone(), buffer[:, :row]
    each = _cache(len(slots), format, gen=gen)
    op(kv, each, torch.arange(len(slots)), format=format)  # row r to slot r
    for r, s in enumerate(slots):
        if s >= 0:
            want[s, :row] = each[r]
    assert op(kv, cache, torch.tensor(slots, dtype=index), format=format) is None
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows_write_nothing(format):
    for kv, slot in ((torch.randn(0, 512), []), (torch.randn(2, 512), [-1, -1])):
        cache = _cache(3, format)
        before = cache.clone()
        op(kv, cache, torch.tensor(slot, dtype=torch.int32), format=format)
        assert torch.equal(cache, before)


def test_rows_may_come_from_the_cache_itself():
    cache = torch.randn(4, 8)
    want = cache[[1, 0, 2, 3]]
    op(cache[:2], cache, torch.tensor([1, 0]))
    assert torch.equal(cache, want)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_the_mutation(format, layout):
    cache = _cache(5, format)
    if layout == "strided":
        cache = torch.cat((cache, cache), 1)[:, : BYTES.get(format, 512)]
    args = (torch.randn(3, 512), cache, torch.tensor([4, -1, 0]))
    torch.library.opcheck(op.default, args, dict(format=format))


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_written_when_a_slot_is_refused(format):
    for slot, message in (
        ([0, 5], r"slot\[1\] is 5, accepted: -1 to 4"),
        ([0, -2], r"slot\[1\] is -2, accepted: -1 to 4"),
        ([3, 3], "slot holds 3 more than once, accepted: distinct values"),
    ):
        cache = _cache(5, format)
        before = cache.clone()
        with pytest.raises(ValueError, match=f"^kv_cache_write: {message}"):
            op(torch.randn(2, 512), cache, torch.tensor(slot), format=format)
        assert torch.equal(cache, before)


def test_refusals_name_op_argument_found_and_accepted():
    kv, slot = torch.randn(2, 512), torch.tensor([0, 1])

    def refused(kind, message, cache, kv=kv, slot=slot, gs=None, **kwargs):
        before = cache.clone()
        with pytest.raises(kind, match=f"^kv_cache_write: {message}"):
            op(kv, cache, slot, gs, **kwargs)
        assert torch.equal(cache, before)

    refused(TypeError, "cache is f32, accepted with format 'fp8': u8", _cache(3, "none"), format="fp8")
    refused(TypeError, "cache is u8, accepted with format 'none': f32", _cache(3, "fp8"))
    refused(TypeError, "cache is bf16, accepted: ", _cache(3, "none").bfloat16())
    refused(
        ValueError,
        "cache has rows of Rb=584, accepted with format 'mxfp4', D=512, rope_dim=64: 368",
        _cache(3, "fp8"),
        format="mxfp4",
    )
    refused(
        ValueError,
        "cache has rows of Rb=256, accepted with format 'none', D=512, rope_dim=64: 512",
        _cache(3, "none", 256),
    )
    refused(ValueError, "rope_dim must be 0 to D", _cache(3, "fp8"), format="fp8", rope_dim=-1)
    refused(ValueError, "rope_dim must be 0 to D", _cache(3, "fp8"), format="fp8", rope_dim=513)
    refused(
        ValueError,
        "D - rope_dim must be a multiple of the block of format, 64 for fp8",
        _cache(3, "fp8"),
        format="fp8",
        rope_dim=80,
    )
    refused(
        ValueError,
        "global_scale is accepted with format 'nvfp4' only",
        _cache(3, "fp8"),
        gs=torch.ones(()),
        format="fp8",
    )
    refused(
        ValueError,
        "global_scale is -1, accepted: finite numbers above 0",
        _cache(3, "nvfp4"),
        gs=-torch.ones(()),
        format="nvfp4",
    )
    refused(
        ValueError,
        r"slot must be \(R\), got shape \(3,\): R=3, but kv has R=2",
        _cache(3, "none"),
        slot=torch.arange(3),
    )
    refused(TypeError, "slot is f32, accepted: i32, i64", _cache(3, "none"), slot=torch.zeros(2))
    refused(ValueError, "format is 'fp4', accepted: none, fp8, nvfp4, mxfp4", _cache(3, "none"), format="fp4")
    with pytest.raises(ValueError, match="kv_cache_write: rows of cache must not overlap"):
        op(kv, torch.zeros(1, 512).expand(3, 512), slot)
