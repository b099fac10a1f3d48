"""Routed experts with many tokens each, which have kernels of their own on Hopper, checked as they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torch_attnkit
from tests.kernels.grouped_gemm.routes import as_sampled, no_expert, ragged
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda import driver
from torch_attnkit.kernels.grouped_gemm.problem import Problem, Weights
from torch_attnkit.kernels.grouped_gemm.sm90.plan import plan
from torch_attnkit.ops.fp4_moe import cases
from torch_attnkit.oracle.compare import check

_ENDLESS = 4_000_000  # instructions of a launch that is caught in a loop


def one_expert(indices: torch.Tensor) -> None:
    indices.fill_(-1)
    indices[:, 0] = 1


# Name: sizes, features, who chooses which expert, schedule.
CASES = {
    "widths of the fewest tokens": (dict(Tq=30, N=160, M=96, E=4, K=2, blk=32), (), as_sampled, 0),
    "all of one expert, few in the mean": (dict(Tq=70, N=96, M=64, E=5, K=1), ("bias",), one_expert, 1),
    "widths of few tokens": (dict(Tq=70, N=256, M=128, E=4, K=2), (), as_sampled, 1),
    "all of one expert": (dict(Tq=150, N=128, M=64, E=4, K=1), (), one_expert, 2),
    "ragged": (dict(Tq=130, N=64, M=192, E=4, K=2), ("bias", "swizzled", "global_scale"), ragged, 3),
    "no expert": (dict(Tq=100, N=64, M=32, E=2, K=1), (), no_expert, 0),
    "spans that are not whole": (
        dict(Tq=60, N=416, M=352, E=2, K=2, blk=32), ("bias", "gptoss", "limit", "interleaved"), as_sampled, 5,
    ),
    "rounded to NVFP4": (dict(Tq=90, N=160, M=96, E=3, K=2, act=1), ("global_scale", "bias"), ragged, 2),
    "rounded to MXFP8": (dict(Tq=60, N=96, M=160, E=2, K=2, blk=32, act=3), ("interleaved",), as_sampled, 3),
    "rounded to MXFP4 by three warpgroups": (dict(Tq=90, N=96, M=224, E=2, K=1, blk=32, act=2), (), as_sampled, 4),
    "an odd number of blocks": (dict(Tq=60, N=304, M=112, E=2, K=2), ("bias", "global_scale"), as_sampled, 2),
    "an odd number of blocks, rounded": (dict(Tq=90, N=112, M=176, E=3, K=1, act=1), ("interleaved",), as_sampled, 1),
    "widths of many tokens": (dict(Tq=430, N=128, M=128, E=2, K=1), ("limit",), as_sampled, 4),
    "widths of some tokens": (dict(Tq=250, N=288, M=160, E=3, K=1, blk=32), ("swizzled",), as_sampled, 0),
    "sorted by several blocks": (dict(Tq=700, N=128, M=64, E=3, K=2), (), as_sampled, 2),
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(8)
@pytest.mark.seconds(300)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name):
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    dims, features, choose, seed = CASES[name]
    gen = torch.Generator().manual_seed(len(name))
    args, kwargs = cases.make(dict(blk=16, act=0) | dims, torch.bfloat16, features, gen)
    choose(args[2])
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    assert len(launches) == 3  # sorting and both products: x and h are rounded on the way, top-k sums behind the second
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    check(f"fp4_moe {name}", got, reference(*args, **kwargs), reference(*double, **kwargs))


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.proof
def test_an_infinite_number_stays_where_it_is():
    """A limit makes gate and up of an infinite number finite; what stands beyond a row's end must not meet it."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("torch_attnkit.sim.ptx")
    gen = torch.Generator().manual_seed(1)
    args, kwargs = cases.make(dict(Tq=60, N=96, M=96, E=2, K=1, blk=16, act=0), torch.bfloat16, ("limit",), gen)
    args[0][7, 5] = torch.inf
    args[3][:, :, 2] = 0x22  # the codes that it meets are above zero, and so is their scale
    args[4][:, :, 0] = 0x38
    with torch_attnkit.simulate("sm90"):
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    want = reference(*args, **kwargs)
    assert bool(want.isfinite().all())
    check("fp4_moe infinite", got, want, reference(*double, **kwargs))


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(1)
@pytest.mark.parametrize("processors", [1, 2, 5])
def test_no_block_waits_for_one_that_has_yet_to_begin(monkeypatch, processors):
    """Totals are shared by those blocks that find all others begun; the last one does, if no other. Counters are back
    at zero for the next call, and sums do not depend on who adds them up."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    monkeypatch.setattr(driver, "_SIMULATED_SMS", 5)
    driver.sm_count.cache_clear()
    dispatch._PLANS["fp4_moe"].clear()
    gen = torch.Generator().manual_seed(1)
    args, kwargs = cases.make(dict(Tq=60, N=288, M=96, E=3, K=2, blk=16, act=0), torch.bfloat16, ("bias",), gen)
    args[2][5] = -1  # a token without experts, whatever its weights
    args[1][5] = torch.nan
    results = []
    for seed in range(2):
        with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed, processors=processors, limit=_ENDLESS):
            results.append(torch.ops.attnkit.fp4_moe(*args, **kwargs))
    driver.sm_count.cache_clear()
    dispatch._PLANS["fp4_moe"].clear()
    assert torch.equal(*results) and not results[0][5].any()
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    check("fp4_moe totals", results[0], reference(*args, **kwargs), reference(*double, **kwargs))


def problem(tokens: int, **changes) -> Problem:
    up, down = (
        Weights(1024, 512, 1024 * 256, 256, 1024 * 32, 32, 32),
        Weights(512, 512, 512 * 256, 256, 512 * 32, 32, 32),
    )
    made = Problem(
        torch.device("cpu"), torch.bfloat16, torch.int32, tokens, 4, 64, up, down, "nvfp4", "none", "silu", 1.702, None,
        False, "linear",
    )  # fmt: skip
    return replace(made, **changes)


def test_how_many_tokens_an_expert_has_decides_which_kernels_run():
    widths = [plan(problem(tokens), 132).token_widths for tokens in (1, 64, 1024, 1600, 3200, 8192)]
    assert widths[0] == widths[1] == ()
    assert 0 < widths[2][-1] < widths[3][-1] < widths[4][-1] <= 256
    assert widths[5] == widths[4]
    # Experts of which most have more than the widest work tile has room for are cut in two.
    assert plan(problem(4096), 132).columns < widths[4][-1]
    assert all(w % 8 == 0 and list(each) == sorted(each) for each in widths for w in each)
    # Numbers of 11 bits are sums of two of bf16, which these kernels do not take; rounded to codes they have fewer.
    half = dict(dtype=torch.float16)
    assert plan(problem(4096, **half), 132).token_widths == ()
    assert plan(problem(4096, activations="mxfp8", **half), 132).token_widths == plan(problem(4096), 132).token_widths
