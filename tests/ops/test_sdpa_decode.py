"""Properties of sdpa_decode, in float64 through its reference unless they say otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.sdpa_decode.reference import reference

seeds = settings(derandomize=True, max_examples=20, deadline=None)
op = torch.ops.attnkit.sdpa_decode


def case(seed: int, B=3, Hq=4, Hkv=2, S=11, D=6, Dv=5, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, D, generator=gen, dtype=dtype)
    k = torch.randn(B, Hkv, S, D, generator=gen, dtype=dtype)
    v = torch.randn(B, Hkv, S, Dv, generator=gen, dtype=dtype)
    kv_len = torch.randint(1, S + 1, (B,), generator=gen, dtype=torch.int32)
    return q, k, v, kv_len


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@seeds
@given(st.integers(0, 999), st.sampled_from([11, 12, 2**40]))
def test_a_window_that_covers_the_cache_equals_none(seed, window):
    args = case(seed)
    same(reference(*args, window=window), reference(*args))


@seeds
@given(st.integers(0, 999))
def test_grouped_heads_equal_repeated_kv_heads(seed):
    q, k, v, n = case(seed)
    same(reference(q, k, v, n), reference(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), n))


@seeds
@given(st.integers(0, 999))
def test_a_sink_is_one_more_key_with_its_score_and_value_zero(seed):
    q, k, v, n = case(seed, B=1)
    sink = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out, lse = reference(q, k, v, n, sink)
    s = torch.einsum("hd,hsd->hs", q[0], k[0].repeat_interleave(2, 0))[:, : n[0]] * 6**-0.5
    p = torch.cat([s, sink[:, None]], 1).softmax(1)[:, :-1]
    same([out[0]], [torch.einsum("hs,hsd->hd", p, v[0].repeat_interleave(2, 0)[:, : n[0]])])
    same([lse[0]], [s.logsumexp(1)])


@seeds
@given(st.integers(0, 999), st.integers(0, 10))
def test_kv_start_and_kv_len_equal_slicing(seed, start):
    q, k, v, _ = case(seed, B=1)
    whole = reference(q, k, v, torch.tensor([9]), None, torch.tensor([min(start, 9)]))
    cut = slice(min(start, 9), 9)
    same(whole, reference(q, k[:, :, cut], v[:, :, cut], torch.tensor([9 - min(start, 9)])))


@seeds
@given(st.integers(0, 999), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_window_and_sink_tokens_keep_the_first_and_the_last_keys(seed, window, sink_tokens, start):
    q, k, v, _ = case(seed, B=1)
    got = reference(q, k, v, torch.tensor([10]), None, torch.tensor([start]), window=window, sink_tokens=sink_tokens)
    kept = [j for j in range(start, 10) if j < start + sink_tokens or j > 9 - window]
    same(got, reference(q, k[:, :, kept], v[:, :, kept], torch.tensor([len(kept)])))


def test_softcap_bounds_the_scores_after_scaling():
    q, k, v, n = case(3, B=1)
    _, lse = reference(q, k, v, n, scale=0.7, softcap=1.5)
    s = torch.einsum("hd,hsd->hs", q[0], k[0].repeat_interleave(2, 0))[:, : n[0]] * 0.7
    same([lse[0]], [(1.5 * torch.tanh(s / 1.5)).logsumexp(1)])


@pytest.mark.parametrize("sink", [None, torch.tensor([0.0, 90.0, -torch.inf, 5.0])])
def test_a_sequence_without_keys_gives_zero_and_minus_infinity(sink):
    q, k, v, _ = case(0, dtype=torch.float32)
    k[:], v[:] = torch.nan, torch.nan
    out, lse = op(q, k, v, torch.zeros(3, dtype=torch.int32), sink)
    assert torch.equal(out, torch.zeros(3, 4, 5)) and torch.equal(lse, torch.full((3, 4), -torch.inf))


def test_garbage_outside_the_valid_range_changes_nothing():
    q, k, v, _ = case(1)
    n, start = torch.tensor([5, 0, 11], dtype=torch.int32), torch.tensor([2, 0, 11], dtype=torch.int32)
    want = reference(q, k.clone(), v.clone(), n, None, start)
    for b in range(3):
        k[b, :, n[b] :], v[b, :, n[b] :] = torch.nan, torch.inf
        k[b, :, : start[b]], v[b, :, : start[b]] = torch.inf, torch.nan
    same(reference(q, k, v, n, None, start), want)


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    q, k, v, n = case(2)
    want = reference(q, k, v, n)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    before = [t.clone() for t in strided]
    got = reference(*strided, n)
    same(got, want)
    assert all(torch.equal(a, b) for a, b in zip(strided, before, strict=True))


INT = torch.int32
BAD = {
    "negative length": (
        dict(kv_len=torch.tensor([1, -2, 3], dtype=INT)),
        ValueError,
        "kv_len[1] is -2, accepted: 0 to 11",
    ),
    "length beyond the cache": (
        dict(kv_len=torch.tensor([1, 2, 12], dtype=INT)),
        ValueError,
        "kv_len[2] is 12, accepted: 0 to 11",
    ),
    "start beyond the cache": (dict(kv_start=torch.tensor([0, 0, 12], dtype=INT)), ValueError, "kv_start[2] is 12"),
    "lengths in float": (dict(kv_len=torch.tensor([1.0, 2.0, 3.0])), TypeError, "kv_len is f32, accepted: i32, i64"),
    "heads that do not divide": (
        dict(q=torch.zeros(3, 5, 6)),
        ValueError,
        "Hq must be a multiple of Hkv (got B=3, Hq=5",
    ),
    "mixed dtypes": (
        dict(k_cache=torch.zeros(3, 2, 11, 6, dtype=torch.bfloat16)),
        TypeError,
        "k_cache is bf16, accepted: f8e4m3, f32",
    ),
    "wrong rank": (dict(q=torch.zeros(3, 6)), ValueError, "q must be (B, Hq, D), got shape (3, 6)"),
    "strided last axis": (
        dict(q=torch.zeros(3, 4, 12)[..., ::2]),
        ValueError,
        "q must be contiguous in its last dimension",
    ),
    "nan scale": (dict(scale=float("nan")), ValueError, "scale is nan, accepted: a number"),
    "negative window": (dict(window=-2), ValueError, "window must be -1 (off) or at least 0"),
    "negative sink_tokens": (dict(sink_tokens=-1), ValueError, "sink_tokens must be at least 0"),
    "negative softcap": (dict(softcap=-1.0), ValueError, "softcap must be 0 (off) or positive"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, message = BAD[bad]
    names = ("q", "k_cache", "v_cache", "kv_len")
    with pytest.raises(error) as caught:
        op(**{**dict(zip(names, case(0, dtype=torch.float32), strict=True)), **change})
    assert str(caught.value).startswith("sdpa_decode: ") and message in str(caught.value)
