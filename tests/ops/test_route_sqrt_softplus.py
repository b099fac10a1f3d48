"""route_sqrt_softplus: the choice is a sort's, the weights are the unbiased scores', and no logit breaks them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.route_sqrt_softplus
F32 = torch.finfo(torch.float32).eps


def _score(x: float) -> float:
    return math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


def _weights(logits, indices, renormalize, scale):
    """The contract in Python's floats, for the experts that were chosen."""
    rows = []
    for x, chosen in zip(logits.double().tolist(), indices.tolist(), strict=True):
        s = [_score(x[e]) for e in chosen]
        total = sum(s) + 1e-20 if renormalize else 1.0
        rows.append([v / total * scale for v in s])
    return torch.tensor(rows, dtype=torch.float64).reshape(indices.shape)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 4),
    experts=st.sampled_from((1, 2, 7, 33, 144)),
    topk=st.integers(1, 9),
    renormalize=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    seed=st.integers(0, 2**20),
)
def test_without_bias_the_largest_logits_win_and_ties_go_to_the_lowest_index(
    rows, experts, topk, renormalize, dtype, seed
):
    topk = min(topk, experts)
    gen = torch.Generator().manual_seed(seed)
    # Quarters between -2 and 2: many ties, and distinct logits have scores that no rounding confuses.
    logits = (torch.randint(-8, 9, (rows, experts), generator=gen) / 4).to(dtype)
    weights, indices = op(logits, topk=topk, renormalize=renormalize, route_scale=2.5)
    want = [sorted(range(experts), key=lambda e, x=x: (-x[e], e))[:topk] for x in logits.tolist()]
    assert indices.dtype == torch.int32 and indices.tolist() == want
    exact = _weights(logits, indices, renormalize, 2.5)
    assert weights.dtype == torch.float32 and weights.shape == (rows, topk)
    assert bool(((weights.double() - exact).abs() <= (topk + 16) * F32 / 2 * exact).all())


def test_bias_steers_the_choice_and_leaves_the_weights_alone():
    logits = torch.randn(16, 144)
    bias = torch.zeros(144)
    bias[[3, 77]] = 100.0
    weights, indices = op(logits, bias, topk=2, renormalize=False)
    assert bool((indices.sort(-1).values == torch.tensor([3, 77])).all())
    exact = _weights(logits, indices, False, 1.0)
    assert bool(((weights.double() - exact).abs() <= 16 * F32 / 2 * exact).all())
    # A constant bias changes nothing where scores are far enough apart to survive its rounding.
    spread = torch.stack([torch.randperm(144) for _ in range(4)]) / 16.0
    plain, shifted = op(spread, topk=6), op(spread, torch.full((144,), 0.5), topk=6)
    assert torch.equal(plain[0], shifted[0]) and torch.equal(plain[1], shifted[1])


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[-torch.inf, -1e30, -200.0, -50.0, 0.0, 50.0, 1e4, 3e38]])
    weights, indices = op(logits, topk=8, renormalize=False)
    assert indices.tolist() == [[7, 6, 5, 4, 3, 0, 1, 2]]  # the last three share the score 0
    exact = [math.sqrt(3e38), 100.0, math.sqrt(50.0), math.sqrt(math.log(2)), math.exp(-25.0), 0.0, 0.0, 0.0]
    assert weights[0].tolist() == pytest.approx(exact, rel=8 * F32, abs=0.0)


@pytest.mark.parametrize("low", [-torch.inf, -1e9, -300.0])
def test_a_row_without_any_score_has_weights_zero(low):
    weights, indices = op(torch.full((2, 5), low), topk=3)
    assert torch.equal(weights, torch.zeros(2, 3)) and indices.tolist() == [[0, 1, 2]] * 2


def test_renormalized_weights_sum_to_the_scale():
    weights, _ = op(torch.randn(64, 256), torch.randn(256), topk=6, route_scale=2.5)
    assert bool(((weights.double().sum(-1) - 2.5).abs() <= 2.5 * 16 * F32).all())


def test_strided_rows_and_poisoned_neighbours_do_not_matter_and_inputs_stay():
    logits, bias = torch.randn(5, 33), torch.randn(33)
    buffer = torch.full((12, 65), torch.nan)
    view = buffer[1:11:2, 16:49]
    view.copy_(logits)
    before = (buffer.clone(), bias.clone())
    (weights, indices), want = op(view, bias, topk=4), op(logits, bias, topk=4)
    assert torch.equal(indices, want[1])
    assert bool(((weights - want[0]).abs() <= (4 + 16) * F32 * want[0]).all())
    weights.zero_()
    assert torch.equal(buffer.nan_to_num(7), before[0].nan_to_num(7)) and torch.equal(bias, before[1])


def test_no_tokens():
    weights, indices = op(torch.zeros(0, 16), topk=2)
    assert weights.shape == indices.shape == (0, 2)


def test_refusals_name_op_argument_found_and_accepted():
    logits = torch.randn(3, 8)
    for topk in (0, -1, 9):
        with pytest.raises(ValueError, match=rf"route_sqrt_softplus: topk must be between 1 and .* E=8, K={topk}\)"):
            op(logits, topk=topk)
    bad = logits.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(ValueError, match="route_sqrt_softplus: logits holds nan, accepted: numbers"):
        op(bad, topk=2)
    bad[1, 2] = torch.inf
    with pytest.raises(ValueError, match="route_sqrt_softplus: logits holds inf, accepted: finite numbers and -inf"):
        op(bad, topk=2)
    with pytest.raises(ValueError, match="route_sqrt_softplus: bias holds nan, accepted: numbers"):
        op(logits, torch.full((8,), torch.nan), topk=2)
    with pytest.raises(ValueError, match=r"route_sqrt_softplus: bias must be \(E\), got shape \(7,\)"):
        op(logits, torch.zeros(7), topk=2)
    with pytest.raises(TypeError, match="route_sqrt_softplus: bias is f64, accepted: f32, bf16, f16"):
        op(logits, torch.zeros(8).double(), topk=2)
    with pytest.raises(ValueError, match="route_sqrt_softplus: route_scale is nan"):
        op(logits, topk=2, route_scale=float("nan"))
