"""The routers' scores over all logits that float32 has, on every target, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.targets import TARGETS, needs, on

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(300)]
OPS = torch.ops.attnkit
EPS = torch.finfo(torch.float32).eps


def logits() -> torch.Tensor:
    """(7, 160): every size of either sign, and closely what lies between -110 and 20, both sides of -104 among it."""
    gen = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(460, generator=gen) * 274 - 148)  # 2^-148 to 2^126
    edges = torch.tensor([-104.0, -103.99999, -104.00001, -103.0, -88.0, -87.0, -40.0, -17.0, -17.00001, 0.0, -0.0])
    close = torch.rand(1120 - 3 * 230 - 11, generator=gen) * 130 - 110
    return torch.cat([sizes[:230], -sizes[230:], edges, close, -104 * torch.rand(230, generator=gen)]).view(7, 160)


def exact(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)) in float64, by the contract 0 below -104."""
    x = x.double()
    return (x.clamp(min=0) + x.abs().neg().exp().log1p()).sqrt().masked_fill(x < -104, 0)


def assert_right(weights: torch.Tensor, want: torch.Tensor, roundings: int) -> None:
    zero = want == 0
    assert not weights[zero].any()
    error = (weights.double() - want)[~zero].abs() / want[~zero]
    assert float(error.max()) <= roundings * EPS


# On the CPU few rows are one pass in C++, many are PyTorch's.
@pytest.mark.parametrize(("target", "rows"), [*((target, 7) for target in TARGETS), ("cpu", 7 * 40)])
def test_scores_of_all_logits_are_right_to_two_roundings(target: str, rows: int):
    """Of every expert and of the largest: with K = E, by a table and by the size of the key. No two keys are alike."""
    needs(target)
    x = logits().repeat(rows // 7, 1)
    E = x.shape[1]
    table = torch.arange(E, dtype=torch.int32).view(1, -1)
    with on(target):
        by_table, _ = OPS.route_hash(x, torch.zeros(rows, dtype=torch.int32), table, renormalize=False)
        weights, indices = OPS.route_sqrt_softplus(x, topk=E, renormalize=False)
    assert_right(by_table, exact(x), 2)
    assert_right(weights, exact(x).gather(1, indices.long()), 2)
    assert torch.equal(indices.sort(1).values, table.expand(rows, E))


@pytest.mark.parametrize("target", TARGETS)
def test_a_small_bias_meets_scores_with_all_their_bits(target: str):
    """Where the bias is as small as the scores, what is chosen depends on them."""
    needs(target)
    x = torch.linspace(-103.9, -88.5, 64).flip(0).repeat(70, 1)  # (70, 64)
    bias = torch.where(torch.arange(64) % 2 == 0, 1e-22, 0.0)
    want = (exact(x[0]) + bias.double()).argsort(descending=True)[:9]
    with on(target):
        weights, indices = OPS.route_sqrt_softplus(x, bias, topk=9, renormalize=False)
    assert indices[69].tolist() == want.tolist()
    assert_right(weights[69], exact(x[0])[want], 2)


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_a_softmax_of_all_logits_is_right(target: str, softmax_first: bool):
    """Rows of logits of one size, from subnormal numbers to 2^126."""
    needs(target)
    gen = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.tensor([-149, -127, -100, -10, 0, 3, 6, 40, 126])).view(-1, 1)
    x = torch.randn(9, 40, generator=gen).clamp(-3, 3) * sizes
    with on(target):
        weights, indices = OPS.route_softmax(x, topk=8, softmax_first=softmax_first)
    ranked = x.double().gather(1, indices.long())
    total = (x.double() if softmax_first else ranked) - ranked[:, :1]
    want = (ranked - ranked[:, :1]).exp() / total.exp().sum(1, keepdim=True)
    apart = (ranked - ranked[:, :1]).abs()
    assert bool((indices[:, 0] == x.argmax(1)).all()) and bool((ranked[:, 1:] <= ranked[:, :-1]).all())
    # A rounding of the difference counts as often as it is large; results below the normal numbers may be 0.
    tolerance = want * EPS * (8 + apart) + torch.finfo(torch.float32).tiny
    assert bool(((weights - want).abs() <= tolerance).all())
