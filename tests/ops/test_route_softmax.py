"""route_softmax: the choice is a sort's of the logits, the weights are a softmax before or after it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.route_softmax
F32 = torch.finfo(torch.float32).eps


def _exact(logits, indices, softmax_first, renormalize, scale):
    """The contract in Python's floats, for the experts that were chosen."""
    rows = []
    for x, chosen in zip(logits.double().tolist(), indices.tolist(), strict=True):
        total = sum(math.exp(v) for v in (x if softmax_first else [x[e] for e in chosen]))
        p = [math.exp(x[e]) / total for e in chosen]
        rows.append([v / (sum(p) if renormalize else 1.0) * scale for v in p])
    return torch.tensor(rows, dtype=torch.float64).reshape(indices.shape)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 4),
    experts=st.sampled_from((1, 2, 7, 33, 144)),
    topk=st.integers(1, 9),
    softmax_first=st.booleans(),
    renormalize=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    seed=st.integers(0, 2**20),
)
def test_the_largest_logits_win_ties_go_to_the_lowest_index_and_weights_are_the_softmax(
    rows, experts, topk, softmax_first, renormalize, dtype, seed
):
    topk = min(topk, experts)
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-8, 9, (rows, experts), generator=gen) / 4).to(dtype)
    weights, indices = op(logits, topk=topk, softmax_first=softmax_first, renormalize=renormalize, route_scale=1.5)
    want = [sorted(range(experts), key=lambda e, x=x: (-x[e], e))[:topk] for x in logits.tolist()]
    assert indices.dtype == torch.int32 and indices.tolist() == want
    exact = _exact(logits, indices, softmax_first, renormalize, 1.5)
    assert weights.dtype == torch.float32 and weights.shape == (rows, topk)
    assert bool(((weights.double() - exact).abs() <= (experts + topk + 16) * F32 / 2 * exact).all())


def test_the_order_does_not_depend_on_how_probabilities_are_rounded():
    # After the softmax the last three are all 0 in float32; as logits they are not equal.
    logits = torch.tensor([[0.0, -300.0, -200.0, -250.0]])
    for first in (False, True):
        weights, indices = op(logits, topk=3, softmax_first=first)
        assert indices.tolist() == [[0, 2, 3]] and weights.tolist() == [[1.0, 0.0, 0.0]]


def test_renormalizing_a_softmax_over_all_is_a_softmax_over_the_chosen():
    logits = torch.randn(32, 128)
    after = op(logits, topk=4)
    both = op(logits, topk=4, softmax_first=True, renormalize=True)
    assert torch.equal(after[1], both[1])
    assert bool(((after[0] - both[0]).abs() <= (128 + 4 + 16) * F32 * after[0]).all())


def test_all_experts_chosen_makes_the_order_of_softmax_and_choice_irrelevant():
    logits = torch.randn(8, 7)
    first, after = op(logits, topk=7, softmax_first=True), op(logits, topk=7)
    assert torch.equal(first[1], after[1])
    assert bool(((first[0] - after[0]).abs() <= (14 + 16) * F32 * after[0]).all())


def test_a_constant_added_to_a_row_changes_nothing():
    logits = torch.randint(-16, 17, (6, 33)) / 4.0  # sums with 4096 are exact
    for a, b in zip(op(logits, topk=5), op(logits + 4096.0, topk=5), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_switched_off_have_weight_zero_and_an_empty_row_no_nan(softmax_first, renormalize):
    logits = torch.full((2, 5), -torch.inf)
    logits[0, 3] = 2.0
    weights, indices = op(logits, topk=3, softmax_first=softmax_first, renormalize=renormalize)
    assert weights.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert indices.tolist() == [[3, 0, 1], [0, 1, 2]]


def test_strided_rows_and_poisoned_neighbours_do_not_matter_and_inputs_stay():
    logits = torch.randn(5, 33)
    buffer = torch.full((12, 65), torch.nan)
    view = buffer[1:11:2, 16:49]
    view.copy_(logits)
    before = buffer.clone()
    (weights, indices), want = op(view, topk=4), op(logits, topk=4)
    assert torch.equal(indices, want[1])
    assert bool(((weights - want[0]).abs() <= (33 + 16) * F32 * want[0]).all())
    weights.zero_()
    assert torch.equal(buffer.nan_to_num(7), before.nan_to_num(7))


def test_no_tokens():
    weights, indices = op(torch.zeros(0, 16), topk=2, softmax_first=True)
    assert weights.shape == indices.shape == (0, 2)


def test_refusals_name_op_argument_found_and_accepted():
    logits = torch.randn(3, 8)
    for topk in (0, -1, 9):
        with pytest.raises(ValueError, match=rf"route_softmax: topk must be between 1 and .* E=8, K={topk}\)"):
            op(logits, topk=topk)
    for value, accepted in ((torch.nan, "numbers"), (torch.inf, "finite numbers and -inf")):
        bad = logits.clone()
        bad[2, 7] = value
        with pytest.raises(ValueError, match=rf"route_softmax: logits holds {value}, accepted: {accepted}"):
            op(bad, topk=2)
    with pytest.raises(TypeError, match="route_softmax: logits is i64, accepted: f32, bf16, f16, f64"):
        op(logits.long(), topk=2)
    with pytest.raises(ValueError, match=r"route_softmax: logits must be \(R, E\), got shape \(8,\)"):
        op(logits[0], topk=2)
