"""Routed experts of many tokens on sm120, checked as they run: block-scaled products."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from tests.kernels.grouped_gemm.routes import as_sampled, no_expert, ragged
from torch_attnkit.core import dispatch, invariance
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.kernels.grouped_gemm.problem import Problem, Weights
from torch_attnkit.kernels.grouped_gemm.sm100 import plan as blackwell
from torch_attnkit.kernels.grouped_gemm.sm120 import plan
from torch_attnkit.kernels.grouped_gemm.sm120.config import Config
from torch_attnkit.ops.fp4_moe import cases
from torch_attnkit.oracle.compare import check

NVFP4, MXFP4, MXFP8 = 1, 2, 3  # activations
B, H = torch.bfloat16, torch.float16


@pytest.fixture
def simulated(monkeypatch):
    """Any number of tokens is many."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    monkeypatch.setattr(plan, "_MANY", 0)
    dispatch._PLANS["fp4_moe"].clear()
    yield pytest.importorskip("torch_attnkit.sim.ptx")
    dispatch._PLANS["fp4_moe"].clear()


# Name: sizes, dtype, features, who chooses which expert, schedule.
CASES = {
    "NVFP4, several tiles": (dict(Tq=150, N=288, M=160, E=4, K=2, blk=16, act=NVFP4), B, ("bias",), ragged, 1),
    "NVFP4, the ring goes round": (
        dict(Tq=34, N=2112, M=1056, E=3, K=1, blk=16, act=NVFP4), H, ("global_scale", "interleaved"), as_sampled, 2,
    ),
    "NVFP4, tiles of 128 tokens": (
        dict(Tq=300, N=224, M=96, E=2, K=1, blk=16, act=NVFP4), B, ("global_scale", "swizzled", "limit"), as_sampled, 3,
    ),
    "MXFP4, half of a word of scales": (
        dict(Tq=60, N=1056, M=96, E=3, K=2, blk=32, act=MXFP4), H, ("gptoss", "limit", "bias"), as_sampled, 4,
    ),
    "MXFP4, tiles of 128 tokens": (
        dict(Tq=200, N=96, M=160, E=1, K=1, blk=32, act=MXFP4), B, ("interleaved", "swizzled", "bias"), as_sampled, 5,
    ),
    "MXFP4, plain": (dict(Tq=40, N=96, M=96, E=3, K=1, blk=32, act=MXFP4), B, (), as_sampled, 6),
    "MXFP8, the ring goes round": (
        dict(Tq=60, N=1056, M=544, E=3, K=2, blk=32, act=MXFP8), B, ("gptoss", "limit", "bias"), ragged, 7,
    ),
    "MXFP8, tiles of 128 tokens": (
        dict(Tq=200, N=384, M=96, E=1, K=1, blk=32, act=MXFP8), H, ("interleaved", "swizzled"), as_sampled, 1,
    ),
    "one token": (dict(Tq=1, N=64, M=32, E=2, K=1, blk=16, act=NVFP4), B, (), as_sampled, 0),
    "more choices than a warp has lanes": (dict(Tq=5, N=64, M=32, E=40, K=37, blk=16, act=NVFP4), B, (), as_sampled, 8),
    "no expert": (dict(Tq=50, N=64, M=32, E=2, K=1, blk=16, act=NVFP4), B, (), no_expert, 0),
}  # fmt: skip


def is_right(name: str, args, kwargs, got: torch.Tensor) -> None:
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype in (B, H) else a for a in args]
    check(f"fp4_moe {name}", got, reference(*args, **kwargs), reference(*double, **kwargs))


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(4)
@pytest.mark.seconds(300)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name, simulated):
    dims, dtype, features, choose, seed = CASES[name]
    args, kwargs = cases.make(dims, dtype, features, torch.Generator().manual_seed(len(name)))
    choose(args[2])
    with torch_attnkit.simulate("sm120"), simulated.settings(check=True, seed=seed), simulated.counting() as launches:
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    assert len(launches) == 3  # sorting, both products
    kind = {"nvfp4": "mma.sync mxf4nvf4", "mxfp4": "mma.sync mxf4", "mxfp8": "mma.sync mxf8f6f4"}[kwargs["activations"]]
    assert all(set(launch.counters["flops"]) <= {kind} for launch in launches)
    is_right(name, args, kwargs, got)


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
def test_nothing_depends_on_the_schedule_or_the_neighbours(simulated):
    """Slots of an expert are in any order; a token's result has the same bits whatever else is in its work tile."""
    args, kwargs = cases.make(
        dict(Tq=40, N=96, M=96, E=2, K=2, blk=16, act=NVFP4), B, ("bias",), torch.Generator().manual_seed(1)
    )
    found = []
    for seed in (0, 3, 7):
        with torch_attnkit.simulate("sm120"), simulated.settings(seed=seed):
            found.append(torch.ops.attnkit.fp4_moe(*args, **kwargs))
    with torch_attnkit.simulate("sm120"):
        half = torch.ops.attnkit.fp4_moe(args[0][20:], args[1][20:], args[2][20:], *args[3:], **kwargs)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0][20:], half)


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("activations", ["mxfp4", "mxfp8"])
def test_h_is_quantised_bit_for_bit(activations, simulated):
    """Weights that select, and a gate of 128, whose sigmoid is 1: every number on the way is exact, so the result is x
    quantised twice, in blocks of every magnitude."""
    T, N, g = 130, 128, torch.Generator().manual_seed(5)
    x = torch.randn(T, N, generator=g) * 2.0 ** torch.randint(-60, 60, (T, 4), generator=g).repeat_interleave(32, 1)
    one = torch.zeros(1, N, N // 2, dtype=torch.uint8)
    one[0, range(N), torch.arange(N) // 2] = torch.tensor([0x02, 0x20], dtype=torch.uint8).repeat(N // 2)
    w13 = torch.cat([torch.zeros_like(one), one], 1)
    scales = [torch.full((1, rows, N // 32), 127, dtype=torch.uint8) for rows in (2 * N, N)]
    bias = torch.cat([torch.full((N,), 128.0), torch.zeros(N)]).bfloat16()[None]
    args = x.bfloat16(), torch.ones(T, 1), torch.zeros(T, 1, dtype=torch.int32), w13, scales[0], one, scales[1]
    words = {"format": "mxfp4", "activations": activations}
    with torch_attnkit.simulate("sm120"):
        got = torch.ops.attnkit.fp4_moe(*args, None, None, bias, **words)
    wanted = OPS["fp4_moe"].module("reference").reference(*args, None, None, bias, **words)
    assert torch.equal(got, wanted) and got.count_nonzero() > T


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
def test_nan_in_a_token_reaches_no_other(simulated):
    args, kwargs = cases.make(
        dict(Tq=34, N=96, M=96, E=2, K=1, blk=16, act=NVFP4), B, ("limit",), torch.Generator().manual_seed(1)
    )
    args[0][7, 5], args[0][9, 40] = torch.nan, torch.inf
    args[4][1, 3, 2] = 0x7F  # a weight's scale that is NaN
    with torch_attnkit.simulate("sm120"):
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    is_right("with NaN", args, kwargs, got)


def problem(tokens: int, activations: str = "nvfp4", row: int = 1440) -> Problem:
    """NVFP4 experts of 2880 x 960; ``row``: bytes from one of w13 to the next."""
    up = Weights(1920, 2880, 1920 * row, row, 1920 * 180, 180, 180)
    down = Weights(2880, 960, 2880 * 480, 480, 2880 * 60, 60, 60)
    return Problem(
        torch.device("cpu"), B, torch.int32, tokens, 4, 64, up, down, "nvfp4", activations, "silu", 1.702, None, False,
        "linear",
    )  # fmt: skip


def test_which_calls_are_block_scaled():
    chosen = lambda *args: isinstance(plan.plan(problem(*args), 170), blackwell.Plan)
    assert [chosen(tokens) for tokens in (1, 511, 512, 8192)] == [False, False, True, True]
    assert not chosen(8192, "none") and not chosen(8192, "mxfp8") and not chosen(8192, "nvfp4", 1448)
    assert [plan.plan(problem(tokens), 170).columns[0] for tokens in (1535, 1536)] == [64, 128]
    with invariance.batch_invariant():
        assert not chosen(8192)


def test_rings_fit():
    for tokens in (64, 128):
        for format, activations in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8")):
            config = Config(format, activations, tokens, True, 1)
            assert config.stages * config.stage_bytes + 1024 <= LIMITS["sm120"].shared and config.stages >= 3
