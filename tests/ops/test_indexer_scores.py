"""indexer_scores: the sum over heads of weighted, rectified products, wherever and however the keys are stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import mxfp4
from torch_attnkit.ops.indexer_scores.reference import reference
from torch_attnkit.oracle import inputs, tensor_cores
from torch_attnkit.oracle.attention import narrow_products

op = torch.ops.attnkit.indexer_scores
OWNER = [0, 0, 0, 1, 1, 1]  # of the six tokens of _plain, two requests
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _brute(q, keys, weights, k_len, owner, entries):
    """Scores and a bound on their float32 error, from numbers in float64: q (Tq, Hi, Di), keys[r] (n, Di).

    A product over Di, a sum over Hi and a few roundings of scales and weights, each term at most its magnitude.
    """
    Tq, Hi, Di = q.shape
    scores, bound = np.full((Tq, entries), -np.inf), np.zeros((Tq, entries))
    for t in range(Tq):
        for j in range(k_len[t]):
            k = keys[owner[t]][j]
            scores[t, j] = sum(weights[t, h] * max(float(q[t, h] @ k), 0.0) for h in range(Hi))
            size = sum(abs(weights[t, h]) * float(np.abs(q[t, h]) @ np.abs(k)) for h in range(Hi))
            bound[t, j] = (Di + Hi + 8) * 2.0**-24 * size
    return scores, bound


def _same(got, scores, bound):
    got = got.double().numpy()
    assert (np.isneginf(got) == np.isneginf(scores)).all()
    seen = np.isfinite(scores)
    assert (np.abs(got[seen] - scores[seen]) <= bound[seen]).all()


def _rows(gen, form, dtype, *shape):
    """Random rows in a format: stored, scale or None, and the numbers that they stand for."""
    x = torch.randn(*shape, generator=gen)
    if form == "none":
        return x.to(dtype), None, x.to(dtype).double().numpy()
    if form == "fp8":
        codes, scale = x.to(torch.float8_e4m3fn), torch.rand(*shape[:-1], 1, generator=gen) + 0.5
        return codes, scale, codes.double().numpy() * scale.double().numpy()
    codes, scale = mxfp4.quantize(x)
    nibbles = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(shape)
    return codes, scale, E2M1[nibbles] * np.repeat(2.0 ** (scale.numpy().astype(float) - 127), 32, -1)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(("none", "fp8", "mxfp4")),
    paged=st.booleans(),
    ids=st.booleans(),
    requests=st.integers(1, 3),
    per_request=st.integers(0, 3),
    pages=st.integers(0, 3),
    page=st.sampled_from((1, 4, 5)),
    heads=st.integers(1, 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 2**20),
)
def test_equals_brute_force_in_every_format_and_storage(
    form, paged, ids, requests, per_request, pages, page, heads, dtype, seed
):
    gen = torch.Generator().manual_seed(seed)
    Tq, S = requests * per_request, pages * page
    q, q_scale, qn = _rows(gen, form, dtype, Tq, heads, 32)
    weights = torch.randn(Tq, heads, generator=gen)
    k_len = inputs.integers(gen, 0, S, Tq)
    request_ids = inputs.integers(gen, 0, requests - 1, Tq) if ids else None
    owner = [t // per_request for t in range(Tq)] if request_ids is None else request_ids.tolist()
    table = None
    if paged:
        n_pages = requests * pages + 2
        k, k_scale, kn = _rows(gen, form, dtype, n_pages, page, 32)
        longest = torch.zeros(requests, dtype=torch.int32)
        for r, n in zip(owner, k_len.tolist(), strict=True):
            longest[r] = max(longest[r], n)
        table = inputs.block_table(gen, longest, page, n_pages, pages)
        keys = [kn[row[row >= 0].numpy()].reshape(-1, 32) for row in table]
    else:
        k, k_scale, keys = _rows(gen, form, dtype, requests, S, 32)
    got = op(q, k, weights, k_len, request_ids, table, q_scale, k_scale, format=form)
    assert got.dtype == torch.float32 and got.shape == (Tq, S)
    _same(got, *_brute(qn, keys, weights.double().numpy(), k_len.tolist(), owner, S))


def _plain(Tq=6, R=2, S=12, Hi=2, Di=32):
    k_len = torch.tensor([12, 0, 5, 1, 7, 12], dtype=torch.int32)[:Tq]
    return torch.randn(Tq, Hi, Di), torch.randn(R, S, Di), torch.randn(Tq, Hi), k_len


def test_a_head_that_points_away_counts_nothing():
    q, k = torch.ones(1, 2, 8), torch.ones(1, 1, 8)
    q[:, 1] = -1
    scores = op(q, k, torch.tensor([[0.5, 1e6]]), torch.tensor([1], dtype=torch.int32))
    assert scores.tolist() == [[4.0]]


def test_scores_are_linear_in_the_weights_and_keep_their_sign():
    q, k, weights, k_len = _plain()
    scores = op(q, k, weights, k_len)  # a power of two changes no rounding
    assert torch.equal(
        op(q, k, -4 * weights, k_len).masked_fill(scores.isinf(), 0), -4 * scores.masked_fill(scores.isinf(), 0)
    )


def test_the_order_of_pages_and_what_lies_outside_them_do_not_matter():
    q, k, weights, _ = _plain()
    # Request 0 sees 12 entries and request 1 only 6: the rest of its second page and its third must not be looked at.
    k_len = torch.tensor([12, 0, 5, 1, 6, 6], dtype=torch.int32)
    pool = torch.full((9, 4, 32), torch.nan)
    table = torch.tensor([[7, 0, 3], [2, 5, 8]], dtype=torch.int32)
    pool[table.long()] = k.unflatten(1, (3, 4))
    pool[5, 2:] = torch.nan
    want = _brute(q.double().numpy(), k.double().numpy(), weights.double().numpy(), k_len.tolist(), OWNER, 12)
    for absent in (8, 999, -1, 2**31 - 1):
        table[1, 2] = absent
        _same(op(q, pool, weights, k_len, block_table=table), *want)


def test_keys_behind_the_length_may_be_nan():
    q, k, weights, k_len = _plain()
    want = op(q, k, weights, k_len)
    k[1, 7:] = torch.nan  # token 5 of request 1 sees them, tokens 3 and 4 do not
    assert torch.equal(op(q, k, weights, k_len)[:5], want[:5])


def test_request_ids_default_to_equal_shares():
    q, k, weights, k_len = _plain()
    ids = torch.tensor(OWNER, dtype=torch.int32)
    assert torch.equal(op(q, k, weights, k_len), op(q, k, weights, k_len, ids))
    swapped = op(q, k.flip(0), weights, k_len, 1 - ids)
    assert torch.equal(swapped, op(q, k, weights, k_len, ids))


def test_a_scale_of_q_may_be_folded_into_the_weights():
    gen = torch.Generator().manual_seed(3)
    q, q_scale, _ = _rows(gen, "fp8", None, 4, 2, 32)
    k, k_scale, _ = _rows(gen, "fp8", None, 2, 9, 32)
    q_scale = 2.0 ** (q_scale > 1)  # powers of two: no rounding differs
    weights, k_len = torch.randn(4, 2), torch.full((4,), 9, dtype=torch.int32)
    folded = op(q, k, weights * q_scale[..., 0], k_len, k_scale=k_scale, format="fp8")
    assert torch.equal(op(q, k, weights, k_len, q_scale=q_scale, k_scale=k_scale, format="fp8"), folded)


def test_strided_inputs_do_not_matter_and_inputs_stay():
    q, k, weights, k_len = _plain()
    wide_k = torch.full((2, 24, 64), torch.nan)
    wide_k[:, ::2, 16:48] = k
    wide_q = q.transpose(0, 1).contiguous().transpose(0, 1)
    given = (wide_q, wide_k[:, ::2, 16:48], weights, k_len)
    before = [t.clone() for t in given]
    got = op(*given)
    _same(got, *_brute(q.double().numpy(), k.double().numpy(), weights.double().numpy(), k_len.tolist(), OWNER, 12))
    got.fill_(0)
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@pytest.mark.parametrize(("Tq", "R", "S"), [(0, 2, 5), (0, 0, 5), (2, 1, 0)])
def test_empty(Tq, R, S):
    k_len = torch.zeros(Tq, dtype=torch.int32)
    assert op(torch.zeros(Tq, 2, 8), torch.zeros(R, S, 8), torch.zeros(Tq, 2), k_len).shape == (Tq, S)


def test_no_pages_are_needed_where_nothing_is_visible():
    k_len, table = torch.zeros(2, dtype=torch.int32), torch.full((2, 3), -1, dtype=torch.int32)
    scores = op(torch.randn(2, 1, 8), torch.zeros(0, 4, 8), torch.randn(2, 1), k_len, block_table=table)
    assert torch.equal(scores, torch.full((2, 12), -torch.inf))


def test_values_out_of_range_are_refused():
    q, k, weights, k_len = _plain()
    for value in (-1, 13):
        bad = k_len.clone()
        bad[4] = value
        with pytest.raises(ValueError, match=rf"indexer_scores: k_len\[4\] is {value}, accepted: 0 to 12"):
            op(q, k, weights, bad)
    ids = torch.tensor([0, 0, 0, 1, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_scores: request_ids\[5\] is 2, accepted: 0 to 1"):
        op(q, k, weights, k_len, ids)
    table = torch.tensor([[0, 1, 2], [3, 9, 4]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_scores: block_table\[1\]\[1\] is 9, accepted: 0 to 5"):
        op(q, k.reshape(6, 4, 32), weights, k_len, block_table=table)
    with pytest.raises(ValueError, match=r"Tq must be a multiple of the number of requests R .*Tq=6, .*R=4"):
        op(q, torch.randn(4, 12, 32), weights, k_len)
    with pytest.raises(ValueError, match=r"Tq must be a multiple of the number of requests R .*Tq=6, .*R=0"):
        op(q, torch.randn(0, 12, 32), weights, k_len)


def test_formats_refuse_what_does_not_belong_to_them():
    gen = torch.Generator().manual_seed(0)
    q, k, weights, k_len = _plain()
    scale_q, scale_k = torch.ones(6, 2, 1), torch.ones(2, 12, 1)
    with pytest.raises(ValueError, match="indexer_scores: format is 'nvfp4', accepted: none, fp8, mxfp4"):
        op(q, k, weights, k_len, format="nvfp4")
    with pytest.raises(ValueError, match="indexer_scores: format 'none' takes neither q_scale nor k_scale"):
        op(q, k, weights, k_len, k_scale=scale_k)
    with pytest.raises(TypeError, match="indexer_scores: q is f32, accepted with format 'fp8': f8e4m3"):
        op(q, k, weights, k_len, format="fp8", k_scale=scale_k)
    q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="indexer_scores: q is f8e4m3, accepted with format 'none': f32"):
        op(q8, k8, weights, k_len)
    with pytest.raises(ValueError, match="indexer_scores: format 'fp8' needs k_scale"):
        op(q8, k8, weights, k_len, format="fp8")
    with pytest.raises(ValueError, match=r"indexer_scores: format 'fp8' needs .* \(Qs = 1\) \(got .*Qs=2"):
        op(q8, k8, weights, k_len, format="fp8", k_scale=torch.ones(2, 12, 2))
    with pytest.raises(TypeError, match="indexer_scores: k_scale is u8, accepted with format 'fp8': f32"):
        op(q8, k8, weights, k_len, format="fp8", k_scale=scale_k.byte())
    (q4, qs, _), (k4, ks, _) = _rows(gen, "mxfp4", None, 6, 2, 64), _rows(gen, "mxfp4", None, 2, 12, 64)
    with pytest.raises(ValueError, match="indexer_scores: format 'mxfp4' needs q_scale and k_scale"):
        op(q4, k4, weights, k_len, format="mxfp4", k_scale=ks)
    with pytest.raises(ValueError, match=r"indexer_scores: format 'mxfp4' needs .*\(got .*Qb=32, .*Qs=1"):
        op(q4, k4, weights, k_len, format="mxfp4", q_scale=qs[..., :1], k_scale=ks[..., :1])
    with pytest.raises(TypeError, match="indexer_scores: q_scale is f32, accepted with format 'mxfp4': u8"):
        op(q4, k4, weights, k_len, format="mxfp4", q_scale=scale_q, k_scale=scale_k)
    with pytest.raises(TypeError, match="indexer_scores: k is f8e4m3, accepted with format 'none': f32"):
        op(q, k8, weights, k_len)


def _e4m3(*values):
    return torch.tensor(values).to(torch.float8_e4m3fn)


def test_tensor_cores_keep_14_bits_of_a_term_below_the_largest():
    """A term that needs no more than 14 bits below the largest leading bit is kept, of others the rest is dropped, and
    those of a later step are aligned to the sum so far."""
    ones = torch.zeros(64).to(torch.float8_e4m3fn)
    for first, second, at, want in (
        (256.0, 2.0**-5, 1, 256 + 2.0**-5),  # 2^8 and 2^-5: 14 bits
        (256.0, 2.0**-6, 1, 256.0),
        (256.0, -(2.0**-6), 1, 256.0),  # towards zero
        (256.0, 1.5 * 2.0**-5, 1, 256 + 2.0**-5),
        (256.0, 2.0**-6, 40, 256.0),  # in the second step of 32
        (0.25, 2.0**-9, 40, 0.25 + 2.0**-9),
    ):
        a, b = ones.clone(), ones.clone()
        a[0], a[at] = first, second
        b[0], b[at] = 1.0, 1.0
        assert tensor_cores.products(a[None], b[None]).item() == want, (first, second, at)


def test_the_place_of_a_term_is_the_sum_of_its_operands_exponents():
    """196 = 14 * 14 lies at 2^6, and 2^-7 is the last bit below that; of 196 itself, which is above 2^7, it is not.
    Numbers below 2^-6 have E4M3's least exponent."""
    for first, second, want in (
        ((14.0, 12.0, 2.0**-7), (14.0, -12.0, 1.0), 52 + 2.0**-7),
        ((14.0, 12.0, 2.0**-8), (14.0, -12.0, 1.0), 52.0),
        ((14.0, 0.0, 2.0**-7), (14.0, 448.0, 1.0), 196.0),  # a sum is cut at its own place; 0 has none
        ((2.0**-9, 2.0**-6, 0.0), (256.0, 1.125 * 2.0**-6, 0.0), 0.5),
        ((2.0**-6, 2.0**-6, 0.0), (32.0, 1.125 * 2.0**-6, 0.0), 0.5 + 2.0**-12),
    ):
        assert tensor_cores.products(_e4m3(*first)[None], _e4m3(*second)[None]).item() == want, (first, second)


def test_tensor_cores_are_exact_on_small_integers_and_pass_nan_on():
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (n, 128), generator=gen).float() for n in (3, 5))
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    assert torch.equal(tensor_cores.products(*codes), a @ b.T)
    a[1, 100] = torch.nan
    got = tensor_cores.products(a.to(torch.float8_e4m3fn), codes[1])
    assert got[1].isnan().all() and not got[::2].isnan().any()


def test_the_reference_adds_up_in_14_bits_for_the_tolerance_alone():
    gen = torch.Generator().manual_seed(0)
    q, q_scale, qn = _rows(gen, "fp8", None, 2, 3, 64)
    k, k_scale, kn = _rows(gen, "fp8", None, 1, 9, 64)
    args = (q, k, torch.randn(2, 3, generator=gen), torch.tensor([9, 5], dtype=torch.int32), None, None)
    wide = [*args[:2], args[2].double(), *args[3:]]
    plain, exact = (reference(*each, q_scale, k_scale, "fp8").double() for each in (args, wide))
    with narrow_products():
        narrow, still = (reference(*each, q_scale, k_scale, "fp8").double() for each in (args, wide))
    assert torch.equal(exact, still) and torch.equal(narrow.isinf(), exact.isinf())
    errors = [(x - exact).masked_fill(exact.isinf(), 0).abs().max() for x in (plain, narrow)]
    largest = exact.masked_fill(exact.isinf(), 0).abs().max()
    assert errors[0] < 2**-20 * largest
    assert 2**-16 * largest < errors[1] < 2**-9 * largest
