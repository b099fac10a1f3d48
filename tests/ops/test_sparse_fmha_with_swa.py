"""Properties of sparse_fmha_with_swa, in float64 through its reference unless they say otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.formats import kv_cache
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


def in_pages(rows: torch.Tensor, page: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, S, D) in pages in random order, one of them nobody's, and their table; slots behind S hold NaN."""
    requests, keys, size = rows.shape
    M = -(-keys // page)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, M * page - keys), value=torch.nan)
    order = torch.randperm(requests * M + 1, generator=gen)
    cache = torch.full((requests * M + 1, page, size), torch.nan, dtype=rows.dtype)
    cache[order[:-1]] = padded.view(requests * M, page, size)
    return cache, order[:-1].view(requests, M).to(INT)


@seeds
@given(st.integers(0, 999), st.sampled_from([1, 2, 4, 9, 16]), st.booleans(), st.booleans(), st.booleans())
def test_keys_in_pages_are_those_without(seed, page, listed, near, far):
    args = case(seed)
    args["topk_indices"] = args["topk_indices"] if listed else None
    gen = torch.Generator().manual_seed(seed)
    paged = dict(args)
    if near:
        paged["swa_kv"], paged["swa_block_table"] = in_pages(args["swa_kv"], page, gen)
    if far:
        paged["compressed_kv"], paged["compressed_block_table"] = in_pages(args["compressed_kv"], page, gen)
    same(reference(**paged, window=3), reference(**args, window=3))


def test_pages_at_which_nobody_looks_may_be_any_number():
    args = case(9) | dict(request_ids=None, swa_end=torch.full((6,), 7, dtype=INT), compressed_len=None)
    args["topk_indices"] = ints(1, -1, 4).expand(6, 3).contiguous()
    gen = torch.Generator().manual_seed(1)
    paged = dict(args)
    paged["swa_kv"], paged["swa_block_table"] = in_pages(args["swa_kv"], 3, gen)
    paged["compressed_kv"], paged["compressed_block_table"] = in_pages(args["compressed_kv"], 2, gen)
    want = reference(**args, window=2)
    paged["swa_block_table"][:, 0], paged["compressed_block_table"][:, 1] = -1, 99
    paged["compressed_block_table"][:, 3] = -(2**31)
    same(reference(**paged, window=2), want)
    paged["swa_block_table"][1, 1] = 7
    with pytest.raises(ValueError, match=r"swa_block_table\[1, 1\] is 7, accepted: 0 to 6"):
        reference(**paged, window=2)
    nowhere = paged | dict(swa_kv=torch.zeros(0, 3, D, dtype=torch.float64))
    with pytest.raises(ValueError, match="swa_kv has no pages, accepted: a page for every key that a token sees"):
        reference(**nowhere, window=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "scale"), [("fp8", None), ("mxfp4", None), ("nvfp4", None), ("nvfp4", 700.0)])
def test_encoded_rows_are_attended_as_if_they_were_decoded_first(format, scale, dtype):
    args = case(10) | {
        name: torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for name, shape in (("q", (6, 3, 96)), ("swa_kv", (R, S, 96)), ("compressed_kv", (R, C, 96)))
    }
    scale = None if scale is None else torch.tensor(scale)
    given, decoded = dict(args), dict(args)
    for name in ("swa_kv", "compressed_kv"):
        given[name] = kv_cache.encode_rows(args[name], format, 32, scale)
        decoded[name] = kv_cache.decode_rows(given[name], format, 96, 32, scale, dtype)
    got = op(**given, format=format, rope_dim=32, global_scale=scale)
    want = op(**decoded)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not torch.equal(got[0], op(**args)[0])


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
    "indices in float": (
        dict(topk_indices=torch.zeros(6, 1)),
        TypeError,
        "topk_indices is f32, accepted: i32, i64",
    ),
    "mixed dtypes": (dict(swa_kv=torch.zeros(2, 9, 6).half()), TypeError, "swa_kv is f16, accepted: u8, f32"),
    "another head size": (
        dict(compressed_kv=torch.zeros(2, 7, 5)),
        ValueError,
        "compressed_kv must be (R, C, D), got shape (2, 7, 5): D=5, but q has D=6",
    ),
    "another number of requests": (
        dict(compressed_kv=torch.zeros(3, 7, 6)),
        ValueError,
        "compressed_kv must be (R, C, D), got shape (3, 7, 6): R=3, but swa_kv has R=2",
    ),
    "a table of other requests": (
        dict(swa_block_table=torch.zeros(3, 1, dtype=INT)),
        ValueError,
        "swa_block_table must be (R, Mw), got shape (3, 1): R=3, but compressed_kv has R=2",
    ),
    "a table without entries": (
        dict(
            compressed_kv=None,
            topk_indices=None,
            compressed_len=None,
            compressed_block_table=torch.zeros(2, 1, dtype=INT),
        ),
        ValueError,
        "compressed_block_table needs compressed_kv",
    ),
    "pages without slots": (
        dict(swa_kv=torch.zeros(4, 0, 6), swa_block_table=torch.zeros(2, 1, dtype=INT)),
        ValueError,
        "pages must have room for a key",
    ),
    "bytes without a format": (
        dict(swa_kv=torch.zeros(2, 9, 6, dtype=torch.uint8)),
        TypeError,
        "swa_kv is u8, accepted with format 'none': f32",
    ),
    "numbers with a format": (
        dict(q=torch.zeros(6, 3, 64), swa_kv=torch.zeros(2, 9, 128), compressed_kv=torch.zeros(2, 7, 128))
        | dict(format="fp8"),
        TypeError,
        "swa_kv is f32, accepted with format 'fp8': u8",
    ),
    "rows of another size": (
        dict(q=torch.zeros(6, 3, 64), compressed_kv=None, topk_indices=None, compressed_len=None)
        | dict(swa_kv=torch.zeros(2, 9, 127, dtype=torch.uint8), format="fp8"),
        ValueError,
        "the caches have rows of Rb=127, accepted with format 'fp8', D=64, rope_dim=64: 128",
    ),
    "channels that are no blocks": (
        dict(compressed_kv=None, topk_indices=None, compressed_len=None)
        | dict(swa_kv=torch.zeros(2, 9, 12, dtype=torch.uint8), format="fp8", rope_dim=0),
        ValueError,
        "D - rope_dim must be a multiple of the block of format, 64 for fp8",
    ),
    "a global scale of no format": (
        dict(global_scale=torch.tensor(1.0)),
        ValueError,
        "global_scale is accepted with format 'nvfp4' only",
    ),
    "unknown format": (dict(format="fp4"), ValueError, "format is 'fp4', accepted: none, fp8, nvfp4, mxfp4"),
    "nan scale": (dict(scale=float("nan")), ValueError, "scale is nan"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, message = BAD[bad]
    with pytest.raises(error) as caught:
        op(**{**case(0, dtype=torch.float32), **change})
    assert str(caught.value).startswith("sparse_fmha_with_swa: ") and message in str(caught.value)
