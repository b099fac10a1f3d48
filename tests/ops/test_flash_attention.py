"""Properties of flash_attention, in float64 through its reference, and its CPU row against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.core.dispatch import plan_of
from torch_attnkit.ops.flash_attention.reference import reference
from torch_attnkit.ops.sdpa_decode.reference import reference as decode

seeds = settings(derandomize=True, max_examples=25, deadline=None)
op = torch.ops.attnkit.flash_attention
B, Hq, Hkv, D = 3, 4, 2, 6


def case(seed: int, T: int, S: int, Dv: int = D, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, Hq, D, generator=gen).to(dtype)
    k = torch.randn(B, S, Hkv, D, generator=gen).to(dtype)
    v = torch.randn(B, S, Hkv, Dv, generator=gen).to(dtype)
    n = torch.randint(0, S + 1, (B,), generator=gen, dtype=torch.int32)
    start = (torch.rand(B, generator=gen) * (n + 1)).int()
    return (q, k, v), torch.randn(Hq, generator=gen), n, start


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


sizes = st.integers(1, 9)
more = st.fixed_dictionaries(
    dict(
        causal=st.booleans(),
        window=st.sampled_from([-1, 0, 1, 3, 2**40]),
        sink_tokens=st.integers(0, 3),
        scale=st.sampled_from([None, 0.3]),
    )
)


@seeds
@given(st.integers(0, 999), sizes, sizes, st.booleans())
def test_a_window_that_covers_every_distance_equals_none(seed, T, S, causal):
    qkv, *_ = case(seed, T, S)
    same(reference(*qkv, causal=causal, window=S + T), reference(*qkv, causal=causal))


@seeds
@given(st.integers(0, 999), sizes, sizes, more)
def test_grouped_heads_equal_repeated_kv_heads(seed, T, S, kwargs):
    (q, k, v), sink, n, start = case(seed, T, S)
    more = (sink, n, start)
    repeated = (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    same(reference(q, k, v, *more, **kwargs), reference(*repeated, *more, **kwargs))


@seeds
@given(st.integers(0, 999), sizes, sizes)
def test_a_sink_is_one_more_key_with_its_score_and_value_zero(seed, T, S):
    """With a constant first query component the extra key (sink, 0, 0, ...) has the score ``sink`` for every query."""
    (q, k, v), *_ = case(seed, T, S)
    q = q[:, :, :2]  # one head per KV head, so that each has its own key
    q[..., 0] = 1.0
    sink = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    extra = torch.zeros(B, 1, Hkv, D, dtype=torch.float64)
    extra[..., 0] = sink
    more = reference(q, torch.cat([k, extra], 1), torch.cat([v, v.new_zeros(B, 1, Hkv, D)], 1), scale=1.0)
    sunk, plain = reference(q, k, v, sink, scale=1.0), reference(q, k, v, scale=1.0)
    same([sunk[0]], [more[0]])
    same([sunk[1]], [plain[1]])
    same([sunk[0]], [plain[0] * (plain[1] - sink).sigmoid()[..., None]])


@seeds
@given(st.integers(0, 999), sizes, sizes, st.sampled_from([-1, 1, 3]), st.integers(0, 2))
def test_the_last_causal_row_equals_a_decode_step(seed, T, S, window, sink_tokens):
    (q, k, v), sink, _, start = case(seed, T, S)
    kwargs = dict(window=window, sink_tokens=sink_tokens, softcap=2.0)
    got = reference(q, k, v, sink, None, start, causal=True, **kwargs)
    full = torch.full((B,), S, dtype=torch.int32)
    want = decode(q[:, -1], k.transpose(1, 2), v.transpose(1, 2), full, sink, start, **kwargs)
    same((got[0][:, -1], got[1][:, -1]), want)


@seeds
@given(st.integers(0, 999), sizes, sizes)
def test_lengths_and_starts_equal_slicing(seed, T, S):
    (q, k, v), sink, n, start = case(seed, T, S)
    out, lse, _ = reference(q, k, v, sink, n, start)
    for b in range(B):
        cut = slice(int(start[b]), int(n[b]))
        want = reference(q[b : b + 1], k[b : b + 1, cut], v[b : b + 1, cut], sink)
        same((out[b : b + 1], lse[b : b + 1]), want[:2])


@seeds
@given(st.integers(0, 999), sizes, sizes, more)
def test_every_row_sees_the_keys_that_the_rules_allow(seed, T, S, kwargs):
    (q, k, v), sink, n, start = case(seed, T, S)
    out, lse, _ = reference(q, k, v, sink, n, start, **kwargs)
    W = kwargs["window"]
    for b in range(B):
        for i in range(T):
            p = S - T + i
            kept = [
                j
                for j in range(int(start[b]), int(n[b]))
                if (j <= p or not kwargs["causal"])
                and (W < 0 or abs(p - j) < W or j < int(start[b]) + kwargs["sink_tokens"])
            ]
            want = reference(q[b, i][None, None], k[None, b, kept], v[None, b, kept], sink, scale=kwargs["scale"])
            same((out[b, i], lse[b, i]), (want[0][0, 0], want[1][0, 0]))


@seeds
@given(st.integers(0, 999), sizes, st.integers(0, 9), more)
def test_the_numerator_over_the_row_sum_is_the_normalised_result(seed, T, S, kwargs):
    qkv, _, n, start = case(seed, T, S)
    out, lse, row_sum = reference(*qkv, None, n, start, normalize=False, **kwargs)
    want, want_lse, empty = reference(*qkv, None, n, start, **kwargs)
    assert empty.shape == (0,) and torch.equal(lse, want_lse)
    assert torch.equal(row_sum == 0, lse == -torch.inf)
    assert (row_sum[row_sum > 0] >= 1).all()  # the largest score counts 1: the numerator cannot overflow
    same([out / row_sum.where(row_sum > 0, 1.0)[..., None]], [want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Dv", [6, 4])
def test_keys_that_nobody_sees_may_hold_nan(dtype, causal, Dv):
    (q, k, v), sink, *_ = case(0, 4, 9, Dv, dtype)
    n, start = torch.tensor([9, 0, 7], dtype=torch.int32), torch.tensor([3, 0, 7], dtype=torch.int32)
    want = op(q, k.clone(), v.clone(), sink, n, start, causal=causal)
    for b in range(B):
        k[b, : start[b]], k[b, n[b] :], v[b, : start[b]], v[b, n[b] :] = (torch.nan,) * 4
    got = op(q, k, v, sink, n, start, causal=causal)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert torch.equal(got[0][1:], torch.zeros_like(got[0][1:])) and (got[1][1:] == -torch.inf).all()
    assert not got[0].isnan().any() and got[1][0].isfinite().all()


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    qkv, sink, n, start = case(2, 5, 8)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    same(reference(*strided, sink, n, start), reference(*qkv, sink, n, start))
    strided = [t.float() for t in strided]
    before = [t.clone() for t in (*strided, sink, n, start)]
    op(*strided, sink, n, start)
    assert all(torch.equal(a, b) for a, b in zip((*strided, sink, n, start), before, strict=True))


ROW = [torch.float32, torch.float16, torch.bfloat16]


def check_row(args, kwargs):
    """The row runs, and errs at most twice as much as the reference in the same dtype (plus four units)."""
    got = op(*args, **kwargs)
    assert plan_of("flash_attention", *args, **kwargs).where == "cpu"
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in args]
    exact, near = reference(*wide, **kwargs), reference(*args, **kwargs)
    for g, lo, hi in list(zip(got, near, exact, strict=True))[:2]:
        if g.numel() == 0:
            assert g.shape == hi.shape
            continue
        assert g.dtype == lo.dtype and torch.equal(g.isinf(), hi.isinf()) and not g.isnan().any()
        g, lo, hi = (t.double().nan_to_num(neginf=0.0) for t in (g, lo, hi))
        eps = torch.finfo(args[0].dtype if g.dim() == 4 else torch.float32).eps
        allowed = 2 * (lo - hi).abs().max() + 4 * eps * hi.abs().max()
        assert (g - hi).abs().max() <= allowed
    assert got[2].shape == (0,)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([4, D, 7]),
    st.sampled_from(ROW),
    st.booleans(),
    st.booleans(),
    more,
)
def test_the_cpu_row_agrees_with_the_reference(seed, T, S, Dv, dtype, padded, sunk, kwargs):
    qkv, sink, n, start = case(seed, T, S, Dv, dtype=dtype)
    check_row((*qkv, sink if sunk else None, n if padded else None, start if padded else None), kwargs)


@pytest.mark.parametrize("dtype", ROW)
@pytest.mark.parametrize("kwargs", [{}, dict(causal=True), dict(causal=True, window=40, sink_tokens=2)], ids=str)
def test_the_cpu_row_agrees_across_blocks_of_keys_that_are_masked_as_a_whole(dtype, kwargs):
    (q, k, v), sink, *_ = case(7, 70, 1300, dtype=dtype)
    n, start = torch.tensor([1300, 0, 1250]), torch.tensor([600, 0, 0])
    check_row((q, k, v, sink, n.int(), start.int()), kwargs)


INT = torch.int32
BAD = {
    "negative length": (
        dict(kv_len=torch.tensor([1, -2, 3], dtype=INT)),
        ValueError,
        "kv_len[1] is -2, accepted: 0 to 7",
    ),
    "length beyond the keys": (
        dict(kv_len=torch.tensor([1, 2, 8], dtype=INT)),
        ValueError,
        "kv_len[2] is 8, accepted: 0 to 7",
    ),
    "start beyond the keys": (dict(kv_start=torch.tensor([9, 0, 0], dtype=INT)), ValueError, "kv_start[0] is 9"),
    "heads that do not divide": (dict(q=torch.zeros(3, 5, 3, 6)), ValueError, "Hq must be a multiple of Hkv"),
    "no KV heads": (
        dict(k=torch.zeros(3, 7, 0, 6), v=torch.zeros(3, 7, 0, 6)),
        ValueError,
        "Hq must be a multiple of Hkv",
    ),
    "mixed dtypes": (dict(k=torch.zeros(3, 7, 2, 6).half()), TypeError, "k is f16, accepted: f32"),
    "integers": (dict(q=torch.zeros(3, 5, 4, 6, dtype=INT)), TypeError, "q is i32, accepted: f32, bf16, f16, f64"),
    "wrong rank": (dict(v=torch.zeros(3, 7, 6)), ValueError, "v must be (B, S, Hkv, Dv), got shape (3, 7, 6)"),
    "strided last axis": (
        dict(v=torch.zeros(3, 7, 2, 12)[..., ::2]),
        ValueError,
        "v must be contiguous in its last dimension",
    ),
    "nan scale": (dict(scale=float("nan")), ValueError, "scale is nan"),
    "a sink for a numerator": (
        dict(sink=torch.zeros(4), normalize=False),
        ValueError,
        "sink is accepted with normalize=True only; give it to merge_partials",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row", [True, False])
def test_bad_input_is_named(bad, row):
    change, error, message = BAD[bad]
    qkv, *_ = case(0, 5, 7, dtype=torch.float32)
    with pytest.raises(error) as caught:
        op(**{**dict(zip("qkv", qkv, strict=True)), "softcap": 0.0 if row else 1.0, **change})
    assert str(caught.value).startswith("flash_attention: ") and message in str(caught.value)
