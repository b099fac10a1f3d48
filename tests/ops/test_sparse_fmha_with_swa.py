"""Properties of sparse_fmha_with_swa, in float64 through its reference unless they say otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.flash_attention.reference import reference as flash
from torch_attnkit.ops.sparse_fmha_with_swa import reference as module

reference = module.reference
op = torch.ops.attnkit.sparse_fmha_with_swa
seeds = settings(derandomize=True, max_examples=25, deadline=None)
INT = torch.int32
R, S, C, K, D = 2, 9, 7, 4, 6


def case(seed: int, Tq: int = 6, Hq: int = 3, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(Tq, Hq, D, generator=gen, dtype=dtype),
        swa_kv=torch.randn(R, S, D, generator=gen, dtype=dtype),
        swa_end=torch.randint(0, S + 1, (Tq,), generator=gen, dtype=INT),
        compressed_kv=torch.randn(R, C, D, generator=gen, dtype=dtype),
        topk_indices=(torch.rand(Tq, C, generator=gen).argsort(-1)[:, :K]).to(INT).masked_fill(
            torch.rand(Tq, K, generator=gen) < 0.3, -1
        ),
        compressed_len=torch.randint(0, C + 1, (Tq,), generator=gen, dtype=INT),
        request_ids=torch.randint(0, R, (Tq,), generator=gen, dtype=INT),
        sink=torch.randn(Hq, generator=gen),
    )  # fmt: skip


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@seeds
@given(
    st.integers(0, 999),
    st.sampled_from([1, 3, 128]),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_token_equals_dense_attention_over_the_keys_it_names(seed, Hq, window, listed, limited, normalize):
    args = case(seed, Hq=Hq)
    args["topk_indices"] = args["topk_indices"] if listed else None
    args["compressed_len"] = args["compressed_len"] if limited else None
    args["sink"] = args["sink"] if normalize else None
    got = reference(**args, window=window, normalize=normalize)
    for t in range(6):
        r, end = int(args["request_ids"][t]), int(args["swa_end"][t])
        far = args["topk_indices"][t].tolist() if listed else range(C)
        limit = int(args["compressed_len"][t]) if limited else C
        far = [j for j in far if 0 <= j < limit]
        keys = torch.cat([args["swa_kv"][r, max(0, end - window) : end], args["compressed_kv"][r, far]])
        want = flash(
            args["q"][t][None, None],
            keys[None, :, None],
            keys[None, :, None],
            args["sink"],
            normalize=normalize,
        )
        for g, w in zip(got, want, strict=True):
            if w.dim() > 1:
                same([g[t]], [w[0, 0]])


@seeds
@given(st.integers(0, 999), st.booleans())
def test_a_list_of_all_entries_in_any_order_equals_no_list(seed, limited):
    args = case(seed)
    args["compressed_len"] = args["compressed_len"] if limited else None
    everything = torch.rand(6, C, generator=torch.Generator().manual_seed(seed)).argsort(-1).to(INT)
    want = reference(**{**args, "topk_indices": None}, window=4)
    same(reference(**{**args, "topk_indices": everything}, window=4), want)


@seeds
@given(st.integers(0, 999))
def test_without_compressed_entries_it_is_causal_window_attention(seed):
    args = case(seed, Tq=S)
    kv = args["swa_kv"][:1]
    got = reference(args["q"], kv, torch.arange(1, S + 1, dtype=INT), sink=args["sink"], window=3)
    want = flash(args["q"][None], kv[:, :, None], kv[:, :, None], args["sink"], causal=True, window=3)
    same(got[:2], (want[0][0], want[1][0]))
    absent = torch.full((S, K), -1, dtype=INT)
    listed = reference(
        args["q"],
        kv,
        torch.arange(1, S + 1, dtype=INT),
        args["compressed_kv"][:1],
        absent,
        sink=args["sink"],
        window=3,
    )
    same(listed[:2], got[:2])


def test_tokens_come_in_equal_blocks_when_no_request_is_named():
    args = case(3)
    blocks = torch.tensor([0, 0, 0, 1, 1, 1], dtype=INT)
    same(reference(**{**args, "request_ids": None}), reference(**{**args, "request_ids": blocks}))


def test_the_numerator_over_the_row_sum_is_the_normalised_result():
    args = case(4) | dict(sink=None)
    out, lse, row_sum = reference(**args, normalize=False)
    want, want_lse, empty = reference(**args)
    same((out / row_sum[..., None], lse), (want, want_lse))
    assert empty.shape == (0,)


def test_chunks_of_tokens_do_not_show(monkeypatch):
    args = case(5)
    want = reference(**args)
    monkeypatch.setattr(module, "CHUNK", 1)
    same(reference(**args), want)


@pytest.mark.parametrize("C", [0, 5])
@pytest.mark.parametrize("S", [0, 5])
@pytest.mark.parametrize("window", [0, 128])
def test_a_token_with_nothing_to_attend_gives_zero_and_minus_infinity(C, S, window):
    kv, compressed = torch.full((1, S, D), torch.nan), torch.full((1, C, D), torch.nan)
    q, zero, absent = torch.randn(2, 3, D), torch.zeros(2, dtype=INT), torch.full((2, K), -1, dtype=INT)
    for far in ((None,), (compressed, absent), (compressed, None, zero), (compressed, absent[:, :0])):
        for sink in (None, torch.tensor([0.0, 95.0, -torch.inf])):
            out, lse, _ = op(q, kv, zero, *far, sink=sink, window=window)
            assert torch.equal(out, torch.zeros(2, 3, D)) and torch.equal(lse, torch.full((2, 3), -torch.inf))


def test_entries_that_a_token_does_not_see_may_hold_nan():
    args = case(6, dtype=torch.float32) | dict(request_ids=None, window=2)
    args["swa_end"], args["compressed_len"] = torch.full((6,), 5, dtype=INT), torch.full((6,), 4, dtype=INT)
    want = op(**args)
    args["swa_kv"][:, :3], args["swa_kv"][:, 5:], args["compressed_kv"][:, 4:] = (
        torch.nan,
        torch.nan,
        torch.nan,
    )
    got = op(**args)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) and not got[0].isnan().any()


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    args = case(7)
    strided = {
        n: t.transpose(0, 1).contiguous().transpose(0, 1) if n in ("q", "swa_kv", "compressed_kv") else t
        for n, t in args.items()
    }
    before = {n: t.clone() for n, t in strided.items()}
    same(reference(**strided)[:2], reference(**args)[:2])
    assert all(torch.equal(strided[n], before[n]) for n in before)


def ints(*values):
    return torch.tensor(values, dtype=INT)


TWICE = torch.tensor([[0, 1, 2, 3]] * 5 + [[5, -1, -1, 5]], dtype=INT)
BAD = {
    "end beyond the window keys": (
        dict(swa_end=ints(1, 2, 3, 4, 5, 10)),
        ValueError,
        "swa_end[5] is 10, accepted: 0 to 9",
    ),
    "negative end": (dict(swa_end=ints(-1, 2, 3, 4, 5, 6)), ValueError, "swa_end[0] is -1"),
    "index beyond the entries": (
        dict(topk_indices=torch.full((6, 1), 7, dtype=INT)),
        ValueError,
        "topk_indices[0, 0] is 7, accepted: -1 to 6",
    ),
    "index below -1": (dict(topk_indices=torch.full((6, 1), -2, dtype=INT)), ValueError, "topk_indices[0, 0] is -2"),
    "an index twice": (dict(topk_indices=TWICE), ValueError, "topk_indices holds 5 more than once"),
    "more entries than there are": (
        dict(compressed_len=ints(0, 0, 8, 0, 0, 0)),
        ValueError,
        "compressed_len[2] is 8, accepted: 0 to 7",
    ),
    "unknown request": (dict(request_ids=ints(0, 1, 2, 0, 0, 0)), ValueError, "request_ids[2] is 2, accepted: 0 to 1"),
    "negative request": (dict(request_ids=ints(0, -1, 0, 0, 0, 0)), ValueError, "request_ids[1] is -1"),
    "a list without entries": (
        dict(compressed_kv=None, compressed_len=None),
        ValueError,
        "topk_indices needs compressed_kv",
    ),
    "a length without entries": (
        dict(compressed_kv=None, topk_indices=None),
        ValueError,
        "compressed_len needs compressed_kv",
    ),
    "unequal blocks": (
        dict(request_ids=None, swa_kv=torch.zeros(4, 9, 6), compressed_kv=torch.zeros(4, 7, 6)),
        ValueError,
        "Tq must be a multiple of R when request_ids is not given",
    ),
    "negative window": (dict(window=-1), ValueError, "window must be at least 0"),
    "a sink for a numerator": (dict(normalize=False), ValueError, "sink is accepted with normalize=True only"),
    "indices in int64": (
        dict(topk_indices=torch.zeros(6, 1, dtype=torch.int64)),
        TypeError,
        "topk_indices is i64, accepted: i32",
    ),
    "mixed dtypes": (dict(swa_kv=torch.zeros(2, 9, 6).half()), TypeError, "swa_kv is f16, accepted: f32"),
    "another head size": (
        dict(compressed_kv=torch.zeros(2, 7, 5)),
        ValueError,
        "compressed_kv must be (R, C, D), got shape (2, 7, 5): D=5, but q has D=6",
    ),
    "nan scale": (dict(scale=float("nan")), ValueError, "scale is nan"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, words = BAD[bad]
    with pytest.raises(error) as caught:
        op(**{**case(0, dtype=torch.float32), **change})
    assert str(caught.value).startswith("sparse_fmha_with_swa: ") and words in str(caught.value)
