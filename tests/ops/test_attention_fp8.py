"""Attention of E4M3 codes under scales: what it means, what it returns, who refuses it."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import UnsupportedError
from torch_attnkit.ops.flash_attention.reference import reference
from torch_attnkit.oracle.attention import narrow_products

E4M3 = torch.float8_e4m3fn
op, varlen = torch.ops.attnkit.flash_attention, torch.ops.attnkit.flash_attention_varlen
OPTIONS = dict(causal=True, window=5, sink_tokens=1, softcap=3.0)


def _codes(seed: int = 0, B: int = 2, T: int = 9, Hq: int = 4, Hkv: int = 2, D: int = 16):
    gen = torch.Generator().manual_seed(seed)
    qkv = tuple(torch.randn(B, T, h, D, generator=gen).to(E4M3) for h in (Hq, Hkv, Hkv))
    return qkv, tuple(torch.rand(B, Hkv, generator=gen) + 0.5 for _ in "qkv")


def _dequantised(qkv, scales) -> list[torch.Tensor]:
    """What codes (B, T, H, D) under scales (B, Hkv) stand for, in float32."""
    groups = [t.float().unflatten(2, (s.shape[1], -1)) for t, s in zip(qkv, scales, strict=True)]
    return [(g * s[:, None, :, None, None]).flatten(2, 3) for g, s in zip(groups, scales, strict=True)]


def test_codes_mean_their_numbers_times_their_scales():
    qkv, scales = _codes()
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1))
    out, lse, _ = op(*qkv, sink, None, None, *scales, **OPTIONS)
    want, want_lse, _ = op(*_dequantised(qkv, scales), sink, **OPTIONS)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want.bfloat16())
    torch.testing.assert_close(lse, want_lse)


def test_a_missing_scale_is_one():
    qkv, (scale, *_) = _codes()
    one = torch.ones_like(scale)
    for i in range(3):
        given = [scale if i == j else None for j in range(3)]
        got, want = (
            op(*qkv, None, None, None, *s, **OPTIONS) for s in (given, [s if s is not None else one for s in given])
        )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_of_other_dtypes_do_the_same(dtype):
    qkv, scales = _codes()
    wide = [t.to(dtype) for t in qkv]
    out = op(*wide, None, None, None, *scales, **OPTIONS)[0]
    want = op(*(t.double() for t in _dequantised(qkv, scales)), **OPTIONS)[0]
    assert out.dtype == dtype
    # Scales are float32, whatever the dtype; seen 0.7 eps.
    near = max(torch.finfo(t).eps for t in (dtype, torch.float32)) * want.abs().max().item()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=near)


def test_packed_sequences_equal_a_batch():
    qkv, scales = _codes()
    ends = torch.arange(3, dtype=torch.int32) * 9
    packed = varlen(*(t.flatten(0, 1) for t in qkv), ends, ends, None, *scales, **OPTIONS)
    dense = op(*qkv, None, None, None, *scales, **OPTIONS)
    assert packed[0].dtype == torch.bfloat16
    for p, d in zip(packed, dense, strict=True):
        torch.testing.assert_close(p, d.flatten(0, 1) if d.dim() > 1 else d)


def test_full_caches_equal_a_batch():
    """sdpa_multi, whose caches have their heads first."""
    (q, k, v), scales = _codes()
    caches = (t.transpose(1, 2).contiguous() for t in (k, v))
    length = torch.full((2,), 9, dtype=torch.int32)
    got = torch.ops.attnkit.sdpa_multi(q, *caches, length, None, None, *scales, **OPTIONS)
    assert got[0].dtype == torch.bfloat16
    for g, want in zip(got, op(q, k, v, None, None, None, *scales, **OPTIONS)[:2], strict=True):
        torch.testing.assert_close(g, want)


def test_blocks_over_pages_equal_the_ends_of_caches():
    """flash_attention_paged over pages of three keys: packed blocks of 9 and 4 queries, two tokens of nobody."""
    (q, k, v), scales = _codes()
    caches = [t.transpose(1, 2).contiguous() for t in (k, v)]
    length = torch.tensor([9, 6], dtype=torch.int32)
    pages, table = (t.reshape(6, 3, 2, 16) for t in (k, v)), torch.arange(6, dtype=torch.int32).view(2, 3)
    packed, ends = torch.cat((q[0], q[1, -4:], q[1, :2])), torch.tensor([0, 9, 13], dtype=torch.int32)
    got = torch.ops.attnkit.flash_attention_paged(packed, *pages, ends, table, length, None, *scales, **OPTIONS)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    wholes = torch.ops.attnkit.sdpa_multi(q, *caches, length, None, None, *scales, **OPTIONS)
    lasts = torch.ops.attnkit.sdpa_multi(q[:, -4:].contiguous(), *caches, length, None, None, *scales, **OPTIONS)
    for g, whole, last, rest in zip(got, wholes, lasts, (0.0, -torch.inf), strict=True):
        torch.testing.assert_close(g[:9], whole[0])
        torch.testing.assert_close(g[9:13], last[1])
        assert (g[13:] == rest).all()


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_decode_step_equals_the_last_query_of_a_block(paged):
    """sdpa_decode over the caches of sdpa_multi, and sdpa_decode_paged over pages of three keys."""
    (q, k, v), scales = _codes()
    caches = [t.transpose(1, 2).contiguous() for t in (k, v)]
    length, options = torch.tensor([9, 6], dtype=torch.int32), dict(window=5, sink_tokens=1, softcap=3.0)
    want = torch.ops.attnkit.sdpa_multi(q[:, -1:].contiguous(), *caches, length, None, None, *scales, **options)
    if paged:
        pages, table = (t.reshape(6, 3, 2, 16) for t in (k, v)), torch.arange(6, dtype=torch.int32).view(2, 3)
        got = torch.ops.attnkit.sdpa_decode_paged(q[:, -1], *pages, table, length, None, None, *scales, **options)
    else:
        got = torch.ops.attnkit.sdpa_decode(q[:, -1], *caches, length, None, None, *scales, **options)
    assert got[0].dtype == torch.bfloat16
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w[:, 0])


def _decode(q, k, v, scales, *, paged: bool = False, scale: float | None = None):
    """A step of q (B, Hq, D) over the keys (B, S, Hkv, D) of three lengths or two, in pages of 1 where asked for."""
    length = torch.tensor([k.shape[1], 6, 0][: len(q)], dtype=torch.int32)
    options = dict(window=5, sink_tokens=1, softcap=3.0, scale=scale)
    if paged:
        table = torch.arange(k.shape[0] * k.shape[1], dtype=torch.int32).flip(0).view(k.shape[:2])
        pages = (torch.empty_like(t).flatten(0, 1)[:, None] for t in (k, v))
        pages = [p.copy_(t.flatten(0, 1).flip(0)[:, None]) for p, t in zip(pages, (k, v), strict=True)]
        return torch.ops.attnkit.sdpa_decode_paged(q, *pages, table, length, None, None, *scales, **options)
    caches = [t.transpose(1, 2).contiguous() for t in (k, v)]
    return torch.ops.attnkit.sdpa_decode(q, *caches, length, None, None, *scales, **options)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_wide_queries_over_codes_mean_the_numbers(dtype, paged):
    """And results have the queries' dtype."""
    (q, k, v), scales = _codes(B=3)
    q = (q[:, -1].double() * 1.01).to(dtype)
    out, lse = _decode(q, k, v, scales, paged=paged)
    want, want_lse = _decode(q.double(), k.double(), v.double(), scales, paged=paged)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse.double())


def test_caches_of_one_dtype_that_is_the_queries_or_e4m3():
    (q, k, v), scales = _codes()
    for q_dtype, k_dtype, v_dtype, message in (
        (torch.bfloat16, E4M3, torch.bfloat16, "sdpa_decode: v_cache is bf16, accepted: f8e4m3, the dtype of k_cache"),
        (torch.bfloat16, torch.bfloat16, E4M3, "sdpa_decode: v_cache is f8e4m3, accepted: bf16, the dtype of k_cache"),
        (torch.bfloat16, torch.float16, torch.float16, "sdpa_decode: k_cache is f16, accepted: f8e4m3, bf16"),
        (E4M3, torch.bfloat16, torch.bfloat16, "sdpa_decode: k_cache is bf16, accepted: f8e4m3"),
        (torch.bfloat16, torch.float8_e5m2, torch.float8_e5m2, "sdpa_decode: k_cache is f8e5m2, accepted: f8e4m3"),
    ):
        with pytest.raises(TypeError, match=message):
            _decode(q[:, -1].to(q_dtype), k.to(k_dtype), v.to(v_dtype), scales)


def test_kernels_over_caches_of_codes_name_the_sizes_that_they_have():
    """Not that those of another dtype, which have more, would be read by others."""
    (q, k, v), _ = _codes(D=80)
    why = r"sdpa_decode on sm90 \(simulated\): sm90: D=80 not in \{64, 128, 256\}$"
    with torch_attnkit.simulate("sm90"), pytest.raises(UnsupportedError, match=why):
        _decode(q[:, -1].bfloat16(), k, v, (None,) * 3)


def test_only_the_tolerance_rounds_probabilities():
    """The reference itself keeps them; under ``narrow_products`` each errs by at most 2^-4 of itself."""
    (q, k, v), _ = _codes(T=40)
    exact = reference(q, k, v)[0].double()
    with narrow_products():
        rounded = reference(q, k, v)[0].double()
        wide = reference(q.float(), k.float(), v.float())[0]
    assert torch.equal(exact, wide.bfloat16().double()), "only codes are rounded"
    most = reference(q.double(), k.double(), v.double().abs())[0] / 16 + 2**-8 * exact.abs().max()
    error = (rounded - exact).abs()
    assert 0 < error.max() and bool((error <= most).all())


@pytest.mark.parametrize("i", range(3))
def test_one_dtype_for_all(i):
    qkv, _ = _codes()
    mixed = [t.bfloat16() if i == j else t for j, t in enumerate(qkv)]
    with pytest.raises(
        TypeError, match=r"flash_attention: [qkv] is \w+, accepted: \w+ \(\w+ is the dtype of this call"
    ):
        op(*mixed)
    with pytest.raises(TypeError, match=r"flash_attention: q is f8e5m2, accepted: f32, bf16, f16, f64, f8e4m3"):
        op(*(t.to(torch.float8_e5m2) for t in qkv))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive(bad):
    qkv, scales = _codes()
    scales[1][1, 0] = bad
    with pytest.raises(ValueError, match=r"flash_attention: k_scale\[1, 0\] is .*, accepted: finite numbers above 0"):
        op(*qkv, None, None, None, *scales)


def test_kernels_without_codes_or_scales_refuse_them():
    odd, _ = _codes(D=80)
    with torch_attnkit.simulate("sm90"), pytest.raises(UnsupportedError, match=r"sm90: D=80 not in \{[\d, ]+\}"):
        op(*odd)
    qkv, scales = _codes(D=64)
    wide = [t.bfloat16() for t in qkv]
    for arch, row in (("metal", "mps"), ("sm90", "sm90"), ("sm100", "sm100")):
        with torch_attnkit.simulate(arch), pytest.raises(UnsupportedError, match=f"{row}: no support for: .*scales"):
            op(*wide, None, None, None, *scales)


def _over_pages(dtype: torch.dtype, page: int, scales=(None,) * 3):
    """Four queries over eight pages of ``page`` keys, D 64."""
    q, cache = torch.ones(4, 4, 64).to(dtype), torch.ones(8, page, 2, 64).to(dtype)
    ends, table, length = (torch.tensor(n, dtype=torch.int32) for n in ([0, 4], [[3, 0, 1, 2, 4, 5, 6, 7]], [8]))
    return torch.ops.attnkit.flash_attention_paged(q, cache, cache, ends, table, length, None, *scales)


@pytest.mark.parametrize(
    ("arch", "dtype", "page", "scaled", "why"),
    [
        ("sm90", E4M3, 1, True, "sm90: Ps must be a multiple of 8"),
        ("sm90", E4M3, 12, False, "sm90: Ps must be a multiple of 8"),
        ("sm90", torch.bfloat16, 16, True, "sm90: no support for: scales"),
        ("sm100", E4M3, 16, False, r"sm100: dtype f8e4m3 not in \{bf16, f16\}"),
        ("metal", torch.bfloat16, 16, True, "mps: no support for: scales"),
    ],
)
def test_kernels_over_pages_refuse_what_they_do_not_read(arch, dtype, page, scaled, why):
    scales = (torch.ones(1, 2),) * 3 if scaled else (None,) * 3
    with torch_attnkit.simulate(arch), pytest.raises(UnsupportedError, match=why):
        _over_pages(dtype, page, scales)
    assert _over_pages(dtype, page, scales)[0].dtype == torch.bfloat16, "the definition takes it"


def test_decode_kernels_refuse_other_head_dims_of_codes():
    q, cache, length = (
        torch.ones(1, 4, 80).to(E4M3),
        torch.ones(1, 1, 16, 80).to(E4M3),
        torch.ones(1, dtype=torch.int32),
    )
    for arch, why in (
        ("sm100", r"D=80 not in \{64, 128, 256, 512\}"),
        ("sm90", r"D=80 not in \{64, 128, 256\}"),
    ):
        with torch_attnkit.simulate(arch), pytest.raises(UnsupportedError, match=f"{arch}: .*{why}"):
            torch.ops.attnkit.sdpa_decode(q, cache, cache, length)


@pytest.mark.parametrize("scaled", [False, True])
def test_torch_takes_codes(scaled):
    """opcheck, but for its test of the schema, which subtracts inputs: torch has no such kernel for E4M3; and a graph
    with symbolic sizes."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    qkv, scales = _codes()
    args = (*qkv, None, None, None, *(scales if scaled else (None,) * 3))
    torch.library.opcheck(torch.ops.attnkit.flash_attention.default, args, dict(causal=True), test_utils=tests)
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = (*(t.flatten(0, 1) for t in qkv), ends, ends, None, *args[6:])
    torch.library.opcheck(torch.ops.attnkit.flash_attention_varlen.default, packed, dict(causal=True), test_utils=tests)
    pages, table = (t.reshape(6, 3, 2, 16) for t in qkv[1:]), torch.arange(6, dtype=torch.int32).view(2, 3)
    blocks = (packed[0], *pages, ends, table, ends.diff(), None, *args[6:])
    torch.library.opcheck(torch.ops.attnkit.flash_attention_paged.default, blocks, test_utils=tests)
    torch._dynamo.reset()
    step = torch.compile(lambda *a: op(*a)[0] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(step(*args), op(*args)[0] * 2)


def test_torch_takes_wide_queries_over_codes():
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    (q, k, v), scales = _codes()
    caches = (t.transpose(1, 2).contiguous() for t in (k, v))
    args = (q[:, -1].bfloat16(), *caches, torch.tensor([9, 6], dtype=torch.int32), None, None, *scales)
    torch.library.opcheck(torch.ops.attnkit.sdpa_decode.default, args, test_utils=tests)
