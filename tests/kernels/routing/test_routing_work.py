"""The routers' kernels on a simulated H200: ties, what no caller should pass, how exact scores are, one launch."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

OPS = torch.ops.attnkit
EPS = torch.finfo(torch.float32).eps
# (experts, rounds): in registers, with experts past the end of a lane, and read once a round.
SPREADS = [(256, 6), (144, 16), (70, 20), (1100, 4)]


def simulated(name, *args, **kwargs):
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True), ptx.counting() as launches:
        out = getattr(OPS, name)(*args, **kwargs)
    assert len(launches) == 1
    return out, launches[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("experts", "topk"), SPREADS)
@pytest.mark.parametrize("name", ["route_softmax", "route_sqrt_softplus"])
def test_ties_go_to_the_lowest_index(name, experts, topk, dtype):
    """All equal; two values in turns; the largest in one lane, in two lanes, last of all; 0 and -0."""
    logits = torch.zeros(7, experts)
    logits[1, ::2] = 1.0
    logits[2, 8:14] = 2.0
    logits[3, [3, 4, 40, 41, 60]] = 3.0
    logits[4, -3:] = 1.0
    logits[5, 1::2] = -0.0
    logits[6, :] = -torch.inf
    (weights, indices), _ = simulated(name, logits.to(dtype), topk=topk, renormalize=True)
    want = [sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:topk] for row in logits.tolist()]
    assert indices.tolist() == want
    assert bool((weights[:6].sum(-1) - 1).abs().max() <= 16 * EPS) and bool((weights[6] == 0).all())


@pytest.mark.sample(4)
@pytest.mark.parametrize(("experts", "topk"), SPREADS)
@pytest.mark.parametrize("bad", [0x7FC0, -64, 0x7F80], ids=["nan", "-nan", "inf"])  # bf16
@pytest.mark.parametrize("name", ["route_softmax", "route_sqrt_softplus"])
def test_numbers_that_are_refused_on_the_cpu_lead_nowhere(name, bad, experts, topk):
    """Kernels cannot look before they run: whatever comes of it, indices name experts and nothing else is touched."""
    bad = torch.tensor(bad, dtype=torch.int16).view(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(3, experts).to(dtype)
        logits[0], logits[1, ::3] = bad.to(dtype), bad.to(dtype)
        (_, indices), _ = simulated(name, logits, topk=topk)
        assert bool(((indices >= 0) & (indices < experts)).all())
        assert torch.equal(indices[2], getattr(OPS, name)(logits[2:], topk=topk)[1][0])


@pytest.mark.parametrize("topk", [6, 40])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_tokens_and_experts_that_do_not_exist_have_weight_zero(topk, integer):
    gen = torch.Generator().manual_seed(0)
    ends = torch.iinfo(integer)
    logits = torch.randn(8, 50, generator=gen)
    ids = torch.tensor([0, 1, 2, -1, 3, 11, ends.max, ends.min], dtype=integer)
    table = torch.randint(0, 50, (11, topk), generator=gen, dtype=integer)
    table[1, 0], table[1, 1], table[2, 2], table[2, 3] = -1, 50, ends.max, ends.min
    (weights, indices), _ = simulated("route_hash", logits, ids, table, renormalize=False)
    assert bool(((indices >= 0) & (indices < 50)).all())
    assert weights[1, :2].tolist() == weights[2, 2:4].tolist() == [0.0, 0.0]
    assert bool((weights[[3, 5, 6, 7]] == 0).all())
    good = torch.tensor([0, 4])
    want = OPS.route_hash(logits[good], ids[good], table, renormalize=False)
    assert torch.equal(indices[good], want[1])
    assert bool(((weights[good] - want[0]).abs() <= 4 * EPS * want[0]).all())


def scores(x: torch.Tensor) -> torch.Tensor:
    """The kernels' sqrt(softplus(x)) of numbers (N,)."""
    table = torch.arange(len(x), dtype=torch.int32).view(1, -1)
    (weights, _), _ = simulated(
        "route_hash", x.view(1, -1), torch.zeros(1, dtype=torch.int32), table, renormalize=False
    )
    return weights[0]


def test_scores_are_right_to_two_roundings_everywhere():
    """For logits of every size, each relative to itself, down to -104: below it e^x is no float32, and so 0."""
    gen = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(6000, generator=gen) * 60 - 45)
    x = torch.cat([sizes, -sizes[sizes < 104], torch.linspace(-104, 20, 6000), torch.tensor([3e38, 0.0, -0.0])])
    wide = x.double()
    exact = (wide.clamp(min=0) + wide.abs().neg().exp().log1p()).sqrt()
    assert float(((scores(x) - exact).abs() / exact).max()) <= 2 * EPS
    assert scores(torch.tensor([-torch.inf, -1e30, -104.5])).tolist() == [0.0, 0.0, 0.0]


def test_without_a_bias_no_score_is_below_that_of_a_smaller_logit_but_for_a_rounding():
    s = scores(torch.linspace(-20, 20, 8001))
    assert bool((s[1:] >= s[:-1]).all())


def test_a_result_depends_on_nothing_but_its_row():
    """The same rows in another order, alone, and among so many that a CTA has several: the same bits."""
    gen = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(2200, 96, generator=gen).bfloat16(), torch.randn(96, generator=gen)
    run = lambda rows: simulated("route_sqrt_softplus", rows, bias, topk=5)[0]
    weights, indices = run(logits)
    for rows in (torch.tensor([7]), torch.tensor([2199, 5, 1000])):
        some = run(logits[rows])
        assert torch.equal(some[0], weights[rows]) and torch.equal(some[1], indices[rows])


@pytest.mark.parametrize(
    ("name", "experts", "topk", "most"), [("route_sqrt_softplus", 256, 6, 720), ("route_softmax", 128, 4, 130)]
)
def test_a_token_takes_few_instructions(name, experts, topk, most):
    """What bounds thousands of tokens. Seen: 692 and 125 of PTX; docs/lab/routing.md counts the machine code."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(64, experts, generator=gen).bfloat16()
    bias = (torch.randn(experts, generator=gen),) if name == "route_sqrt_softplus" else ()
    _, launch = simulated(name, logits, *bias, topk=topk)
    assert launch.counters["instructions"] <= 64 * most
