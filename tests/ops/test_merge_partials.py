"""Properties of merge_partials: attention over a set of keys does not depend on how the set was split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets import TARGETS, needs, on
from torch_attnkit.ops.flash_attention.reference import reference as flash
from torch_attnkit.ops.merge_partials.reference import reference

seeds = settings(derandomize=True, max_examples=30, deadline=None)
op = torch.ops.attnkit.merge_partials
T, S, H, D = 3, 12, 2, 6


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def parts(seed: int, cuts: list[int], normalize: bool):
    """q, k, v, a sink, and the attention over each of the chunks between ``cuts``: (P, T, H, ...)."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, H, D, generator=gen, dtype=torch.float64) for n in (T, S, S))
    edges = [0, *sorted(cuts), S]
    found = [
        [t[0] for t in flash(q, k[:, a:b], v[:, a:b], normalize=normalize)[: 2 if normalize else 3]]
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return (q, k, v), torch.randn(H, generator=gen), [torch.stack(t) for t in zip(*found, strict=True)]


cuts = st.lists(st.integers(0, S), max_size=5)  # equal cuts make empty chunks


@seeds
@given(st.integers(0, 999), cuts, st.booleans(), st.booleans())
def test_any_split_of_the_keys_merges_to_the_whole(seed, cuts, normalize, with_sink):
    (q, k, v), sink, (out, lse, *row_sum) = parts(seed, cuts, normalize)
    sink = sink if with_sink else None
    whole = flash(q, k, v, sink)
    same(reference(out, lse, sink, *row_sum), (whole[0][0], whole[1][0]))


@seeds
@given(st.integers(0, 999), cuts, st.randoms(use_true_random=False))
def test_the_order_of_the_partials_does_not_matter(seed, cuts, random):
    _, _, (out, lse) = parts(seed, cuts, True)
    order = list(range(len(out)))
    random.shuffle(order)
    same(reference(out[order], lse[order]), reference(out, lse))


@seeds
@given(st.integers(0, 999), cuts, st.integers(0, 6))
def test_merging_is_associative(seed, cuts, middle):
    _, sink, (out, lse) = parts(seed, cuts, True)
    halves = [reference(out[a], lse[a]) for a in (slice(0, middle), slice(middle, None))]
    again = reference(torch.stack([h[0] for h in halves]), torch.stack([h[1] for h in halves]), sink)
    same(again, reference(out, lse, sink))


def test_the_sink_scales_by_a_sigmoid_and_stays_out_of_the_lse():
    _, sink, (out, lse) = parts(1, [4], True)
    (plain, plain_lse), (sunk, sunk_lse) = reference(out, lse), reference(out, lse, sink)
    same((sunk, sunk_lse), (plain * (plain_lse - sink).sigmoid()[..., None], plain_lse))


@pytest.mark.parametrize("sink", [None, torch.tensor([-torch.inf, 3.0])])
@pytest.mark.parametrize("counted", [False, True])
def test_partials_that_saw_nothing_are_not_looked_at(sink, counted):
    lse = torch.tensor([[[-torch.inf, 1.0]], [[-torch.inf, -torch.inf]]])  # (2, 1, 2)
    out = torch.full((2, 1, 2, 4), torch.nan)
    out[0, 0, 1] = 6.0
    row_sum = torch.tensor([[[torch.nan, 2.0]], [[0.0, 0.0]]]) if counted else None
    got, got_lse = op(out, lse, sink, row_sum)
    assert torch.equal(got_lse, torch.tensor([[-torch.inf, 1.0]]))
    assert torch.equal(got[0, 0], torch.zeros(4))
    want = (3.0 if counted else 6.0) * (1.0 if sink is None else torch.tensor(1.0 - 3.0).sigmoid())
    torch.testing.assert_close(got[0, 1], torch.full((4,), float(want)))


def test_no_partials_give_zero_and_minus_infinity():
    out, lse = op(torch.empty(0, 2, 3, 4), torch.empty(0, 2, 3))
    assert torch.equal(out, torch.zeros(2, 3, 4)) and torch.equal(lse, torch.full((2, 3), -torch.inf))


def test_large_scores_do_not_overflow():
    lse = torch.tensor([[[3000.0]], [[2999.0]]])
    out, merged = op(torch.ones(2, 1, 1, 4), lse)
    torch.testing.assert_close(merged, lse.logsumexp(0))
    torch.testing.assert_close(out, torch.ones(1, 1, 4), rtol=0, atol=4096 * torch.finfo(torch.float32).eps)


def test_half_precision_partials_are_merged_in_float32_and_rounded_once():
    gen = torch.Generator().manual_seed(0)
    out, lse = torch.randn(5, 3, 2, 8, generator=gen).bfloat16(), torch.randn(5, 3, 2, generator=gen)
    exact, want = op(out.float(), lse)
    for dtype in (None, torch.float32, torch.float16):
        got, got_lse = op(out, lse, dtype=dtype)
        assert got.dtype == (dtype or torch.bfloat16) and got_lse.dtype == torch.float32
        assert torch.equal(got, exact.to(got.dtype)) and torch.equal(got_lse, want)


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    gen = torch.Generator().manual_seed(0)
    out, lse = torch.randn(3, 4, 2, 8, generator=gen), torch.randn(3, 4, 2, generator=gen)
    strided = out.transpose(0, 1).contiguous().transpose(0, 1)
    before = strided.clone(), lse.clone()
    assert all(torch.equal(a, b) for a, b in zip(op(strided, lse), reference(out, lse), strict=True))
    assert torch.equal(strided, before[0]) and torch.equal(lse, before[1])


BAD = {
    "shapes that differ": (
        dict(lse_partial=torch.zeros(2, 3, 5)),
        ValueError,
        "lse_partial must be (P, R, H), got shape (2, 3, 5): H=5, but out_partial has H=4",
    ),
    "lse in half": (dict(lse_partial=torch.zeros(2, 3, 4).half()), TypeError, "lse_partial is f16, accepted: f32"),
    "wrong rank": (
        dict(out_partial=torch.zeros(2, 3, 4)),
        ValueError,
        "out_partial must be (P, R, H, Dv), got shape (2, 3, 4)",
    ),
    "integer result": (dict(dtype=torch.int32), ValueError, "dtype must be a floating point type"),
    "sink of other heads": (dict(sink=torch.zeros(3)), ValueError, "sink must be (H), got shape (3,)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, message = BAD[bad]
    with pytest.raises(error) as caught:
        op(**{**dict(out_partial=torch.zeros(2, 3, 4, 8), lse_partial=torch.zeros(2, 3, 4)), **change})
    assert str(caught.value).startswith("merge_partials: ") and message in str(caught.value)


@pytest.mark.simulator
@pytest.mark.parametrize("parts", [3, 40])  # on CUDA a few are loaded at once, many are shared by groups of threads
@pytest.mark.parametrize("target", TARGETS)
def test_an_lse_of_inf_is_that_of_a_row_without_keys(target, parts):
    """FlashAttention-2 writes it; what lies beside it may be anything, nan too. The bits are those of -inf."""
    needs(target)
    gen = torch.Generator().manual_seed(parts)
    out, lse = torch.randn(parts, 4, 2, 40, generator=gen), torch.randn(parts, 4, 2, generator=gen)
    row_sum, sink = torch.rand(parts, 4, 2, generator=gen) + 1, torch.tensor([-torch.inf, 3.0])
    empty = torch.rand(parts, 4, 2, generator=gen) < 0.4
    empty[:, 3] = True
    out[empty], row_sum[empty] = torch.nan, torch.nan
    with on(target):
        for more in ((), (sink,), (sink, row_sum)):
            results = [op(out, lse.masked_fill(empty, word), *more) for word in (torch.inf, -torch.inf)]
            assert all(map(torch.equal, *results)) and not bool(results[0][0].isnan().any())
            assert bool((results[0][1][3] == -torch.inf).all())
