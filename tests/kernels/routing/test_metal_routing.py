"""The routers on Metal: ties, what no caller should pass, how exact scores are, what crosses the bus."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.mps import library
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(300)]

OPS = torch.ops.attnkit
EPS = torch.finfo(torch.float32).eps
# (experts, rounds): in registers, with lanes that have fewer, more rounds than lanes, and read once a round.
SPREADS = [(256, 6), (144, 16), (70, 40), (1100, 4)]


def simulated(name, *args, flushed=True, **kwargs):
    """On a machine that takes subnormal numbers for zero, as Apple GPUs do."""
    torch.set_flush_denormal(flushed)
    try:
        with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
            return getattr(OPS, name)(*args, **kwargs)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("experts", "topk"), SPREADS)
@pytest.mark.parametrize("name", ["route_softmax", "route_sqrt_softplus"])
def test_ties_go_to_the_lowest_index(name, experts, topk, dtype):
    """All equal; two values in turns; the largest in one lane and in several; 0 and -0; numbers that tell nobody."""
    logits = torch.zeros(8, experts)
    logits[1, ::2] = 1.0
    logits[2, 8:14] = 2.0
    logits[3, [3, 35, 36, 67, 68]] = 3.0
    logits[4, -3:] = 1.0
    logits[5, 1::2] = -0.0
    logits[6, :] = -torch.inf
    logits[7, :] = torch.arange(experts) * -100.0 - 104.5 if name == "route_sqrt_softplus" else -1e30
    (weights, indices) = simulated(name, logits.to(dtype), topk=topk, renormalize=True)
    seen = logits.clone()
    seen[7] = 0.0  # scores that are 0 tie
    want = [sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:topk] for row in seen.tolist()]
    assert indices.tolist() == want
    assert bool((weights[:6].sum(-1) - 1).abs().max() <= 16 * EPS) and bool((weights[6] == 0).all())


def test_subnormal_logits_have_an_order():
    logits = torch.tensor([[0.0, 2.0**-149, -(2.0**-149), 2.0**-140, 2.0**-126, -0.0]])
    assert simulated("route_softmax", logits, topk=6)[1].tolist() == [[4, 3, 1, 0, 5, 2]]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("experts", "topk"), SPREADS)
@pytest.mark.parametrize("bad", [0x7FC0, -64, -1, 0x7F80], ids=["nan", "-nan", "last-nan", "inf"])  # bf16
@pytest.mark.parametrize("name", ["route_softmax", "route_sqrt_softplus"])
def test_numbers_that_are_refused_on_the_cpu_lead_nowhere(name, bad, experts, topk):
    """Kernels cannot look before they run: whatever comes of it, indices name experts and nothing else is touched."""
    bad = torch.tensor(bad, dtype=torch.int16).view(torch.bfloat16)
    logits = torch.randn(3, experts).bfloat16()
    logits[0], logits[1, ::3] = bad, bad
    _, indices = simulated(name, logits, topk=topk)
    assert bool(((indices >= 0) & (indices < experts)).all())
    assert all(len(set(row)) == topk for row in indices.tolist())
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
    weights, indices = simulated("route_hash", logits, ids, table, renormalize=False)
    assert bool(((indices >= 0) & (indices < 50)).all())
    assert weights[1, :2].tolist() == weights[2, 2:4].tolist() == [0.0, 0.0]
    assert bool((weights[[3, 5, 6, 7]] == 0).all())
    good = torch.tensor([0, 4])
    want = OPS.route_hash(logits[good], ids[good], table, renormalize=False)
    assert torch.equal(indices[good], want[1])
    assert bool(((weights[good] - want[0]).abs() <= 4 * EPS * want[0]).all())


def test_a_table_without_entries_names_nobody():
    weights, indices = simulated("route_hash", torch.randn(3, 5), torch.zeros(3, dtype=torch.int64),
                                 torch.zeros(0, 4, dtype=torch.int32))  # fmt: skip
    assert not weights.any() and not indices.any()


def scores(x: torch.Tensor) -> torch.Tensor:
    """The kernels' sqrt(softplus(x)) of numbers (N,)."""
    table = torch.arange(len(x), dtype=torch.int32).view(1, -1)
    ids = torch.zeros(1, dtype=torch.int32)
    return simulated("route_hash", x.view(1, -1), ids, table, renormalize=False)[0][0]


def test_scores_are_right_to_two_roundings_everywhere():
    """For logits of every size, each relative to itself, down to where e^x is no float32, and so 0."""
    gen = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(1500, generator=gen) * 60 - 45)
    x = torch.cat([sizes, -sizes[sizes < 104], torch.linspace(-104, 20, 2000), torch.tensor([3e38, 0.0, -0.0])])
    wide = x.double()
    exact = (wide.clamp(min=0) + wide.abs().neg().exp().log1p()).sqrt()
    assert float(((scores(x) - exact).abs() / exact).max()) <= 2 * EPS
    assert scores(torch.tensor([-torch.inf, -1e30, -104.5])).tolist() == [0.0, 0.0, 0.0]


def test_without_a_bias_no_score_is_below_that_of_a_smaller_logit_but_for_a_rounding():
    s = scores(torch.linspace(-20, 20, 4001))
    assert bool((s[1:] >= s[:-1] * (1 - EPS)).all())


def test_a_result_depends_on_nothing_but_its_row():
    """The same rows in another order and alone: the same bits."""
    gen = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(50, 96, generator=gen).bfloat16(), torch.randn(96, generator=gen)
    weights, indices = simulated("route_sqrt_softplus", logits, bias, topk=5)
    for rows in (torch.tensor([7]), torch.tensor([49, 5, 10])):
        some = simulated("route_sqrt_softplus", logits[rows], bias, topk=5)
        assert torch.equal(some[0], weights[rows]) and torch.equal(some[1], indices[rows])


@pytest.mark.parametrize(("name", "experts", "topk"), [("route_sqrt_softplus", 256, 6), ("route_softmax", 128, 4)])
def test_a_row_is_read_once_and_one_launch_is_all(name, experts, topk):
    """And two collectives a round choose."""
    logits = torch.randn(64, experts).bfloat16()
    dispatch._PLANS[name].clear()
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        getattr(OPS, name)(logits, topk=topk)
    (report,) = reports
    # Those of the chosen again; in a softmax the largest, too, by each lane that has one.
    again = topk * (2 if name == "route_softmax" else 1)
    assert report.buffers["logits"][0] == 64 * 2 * (experts + again)
    assert report.collectives == 64 * (2 * topk + 1) and report.barriers == 0 and report.divergent == 0


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources(dtype: torch.dtype):
    wide = dtype == torch.float32
    flags = dict(TYPE=dtype, TOPK=40 if wide else 6, RENORMALIZE=wide)
    rows = flags | dict(KEPT=0 if wide else 8, OVER_ALL=wide)
    for op, defines in (
        ("route_softmax", rows | dict(SOFTMAX=1, BIAS=0)),
        ("route_sqrt_softplus", rows | dict(SOFTMAX=0, BIAS=1)),
        ("route_hash", flags | dict(WIDE_IDS=wide, WIDE_TABLE=not wide, LANES=32 if wide else 8)),
    ):
        assert [str(f) for f in lint(library.source(op, defines))] == []
