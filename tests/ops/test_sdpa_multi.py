"""Properties of sdpa_multi, in float64 through its reference unless they say otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.flash_attention.reference import reference as flash
from torch_attnkit.ops.sdpa_decode.reference import reference as decode
from torch_attnkit.ops.sdpa_multi.reference import reference

seeds = settings(derandomize=True, max_examples=25, deadline=None)
op = torch.ops.attnkit.sdpa_multi
B, Hq, Hkv, S, D, Dv = 3, 4, 2, 11, 6, 5


def case(seed: int, T: int, low: int = 0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, Hq, D, generator=gen, dtype=dtype)
    k = torch.randn(B, Hkv, S, D, generator=gen, dtype=dtype)
    v = torch.randn(B, Hkv, S, Dv, generator=gen, dtype=dtype)
    n = torch.randint(low, S + 1, (B,), generator=gen, dtype=torch.int32)
    sink = torch.randn(Hq, generator=gen)
    return (q, k, v, n, sink), (torch.rand(B, generator=gen) * (n + 1)).int()


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


more = st.fixed_dictionaries(
    dict(
        window=st.sampled_from([-1, 0, 1, 4, 2**40]),
        sink_tokens=st.integers(0, 3),
        softcap=st.sampled_from([0.0, 2.0]),
    )
)


@seeds
@given(st.integers(0, 999), st.integers(1, 14), more)
def test_row_r_equals_a_decode_step_at_its_position(seed, T, kwargs):
    (q, k, v, n, sink), start = case(seed, T)
    out, lse = reference(q, k, v, n, sink, start, **kwargs)
    for r in range(T):
        length = n - T + 1 + r  # keys in the cache once row r is
        want = decode(q[:, r], k, v, length.clamp(min=0), sink, start, **kwargs)
        same((out[:, r], lse[:, r]), want)


@seeds
@given(st.integers(0, 999), st.integers(1, 14), st.booleans(), more)
def test_a_full_cache_equals_flash_attention(seed, T, causal, kwargs):
    (q, k, v, _, sink), start = case(seed, T)
    if not causal:
        T = min(T, S)  # a block longer than the cache has rows that do not exist here and do there
        q = q[:, :T]
    n = torch.full((B,), S, dtype=torch.int32)
    got = reference(q, k, v, n, sink, start, causal=causal, **kwargs)
    same(got, flash(q, k.transpose(1, 2), v.transpose(1, 2), sink, None, start, causal=causal, **kwargs)[:2])


@seeds
@given(st.integers(0, 999), st.integers(1, 8))
def test_without_causal_every_query_sees_the_whole_valid_range(seed, T):
    (q, k, v, n, sink), start = case(seed, T, low=8)
    out, lse = reference(q, k, v, n, sink, start, causal=False)
    for r in range(T):
        same((out[:, r], lse[:, r]), decode(q[:, r], k, v, n, sink, start))


@pytest.mark.parametrize("causal", [True, False])
def test_rows_before_the_sequence_attend_nothing_even_beside_nan(causal):
    (q, k, v, _, _), _ = case(0, 4, dtype=torch.float32)
    n = torch.tensor([0, 2, 11], dtype=torch.int32)
    for b in range(B):
        k[b, :, n[b] :], v[b, :, n[b] :] = torch.nan, torch.nan
    out, lse = op(q, k, v, n, causal=causal)
    dead = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(lse == -torch.inf, dead[..., None].expand(B, 4, Hq))
    assert not out.isnan().any() and torch.equal(out[dead], torch.zeros(6, Hq, Dv)) and (out[~dead] != 0).all()


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    (q, k, v, n, sink), _ = case(2, 5)
    want = reference(q, k, v, n, sink)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    before = [t.clone() for t in strided]
    got = reference(*strided, n, sink)
    same(got, want)
    assert all(torch.equal(a, b) for a, b in zip(strided, before, strict=True))


INT = torch.int32
BAD = {
    "negative length": (
        dict(kv_len=torch.tensor([1, -2, 3], dtype=INT)),
        ValueError,
        "kv_len[1] is -2, accepted: 0 to 11",
    ),
    "length beyond the cache": (dict(kv_len=torch.tensor([1, 2, 12], dtype=INT)), ValueError, "kv_len[2] is 12"),
    "negative start": (
        dict(kv_start=torch.tensor([-1, 0, 0], dtype=INT)),
        ValueError,
        "kv_start[0] is -1, accepted: 0 to 11",
    ),
    "heads that do not divide": (dict(q=torch.zeros(3, 2, 3, 6)), ValueError, "Hq must be a multiple of Hkv"),
    "other head size": (
        dict(q=torch.zeros(3, 2, 4, 7)),
        ValueError,
        "k_cache must be (B, Hkv, S, D), got shape (3, 2, 11, 6): D=6, but q has D=7",
    ),
    "mixed dtypes": (dict(v_cache=torch.zeros(3, 2, 11, 5).half()), TypeError, "v_cache is f16, accepted: f32"),
    "wrong rank": (dict(q=torch.zeros(3, 4, 6)), ValueError, "q must be (B, T, Hq, D), got shape (3, 4, 6)"),
    "nan scale": (dict(scale=float("nan")), ValueError, "scale is nan"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, message = BAD[bad]
    args, _ = case(0, 2, dtype=torch.float32)
    with pytest.raises(error) as caught:
        op(**{**dict(zip(("q", "k_cache", "v_cache", "kv_len"), args[:4], strict=True)), **change})
    assert str(caught.value).startswith("sdpa_multi: ") and message in str(caught.value)
