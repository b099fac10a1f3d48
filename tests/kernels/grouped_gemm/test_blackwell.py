"""Routed experts on Blackwell, checked as they run: block-scaled products, and products of decoded weights."""

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
from torch_attnkit.kernels.grouped_gemm.sm100.config import TOKENS, QuantizedRow, bf16_parts, by_scale
from torch_attnkit.kernels.grouped_gemm.sm100.plan import plan
from torch_attnkit.ops.fp4_moe import cases
from torch_attnkit.oracle.compare import check

NONE, NVFP4, MXFP4, MXFP8 = range(4)  # activations


@pytest.fixture
def simulated():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    return pytest.importorskip("torch_attnkit.sim.ptx")


@pytest.fixture
def multiprocessors(monkeypatch):
    """Plans are made for so many: with few, a block has several work tiles, and its rings and sums go round."""

    def chosen(count: int) -> None:
        monkeypatch.setattr(driver, "_SIMULATED_SMS", count)
        driver.sm_count.cache_clear()
        dispatch._PLANS["fp4_moe"].clear()

    yield chosen
    driver.sm_count.cache_clear()
    dispatch._PLANS["fp4_moe"].clear()


def everyone(indices: torch.Tensor) -> None:
    """All choices are there, of five experts the same number or nearly."""
    each = torch.arange(indices.numel(), dtype=indices.dtype) % 5
    indices.copy_(each.view(indices.shape))


def few_of_one(indices: torch.Tensor) -> None:
    """Of the first expert 9, fewer than a CTA of a pair takes; all others are of the second."""
    indices.fill_(1)
    indices[::64] = 0


def one_expert(indices: torch.Tensor) -> None:
    """Of nine."""
    indices.fill_(7)


def ragged_few(indices: torch.Tensor) -> None:
    """Tokens of three experts: most, one, and 9; some tokens have none."""
    indices.fill_(-1)
    indices[:23, 0] = 1
    indices[0, 1] = 0
    indices[-10:-1, 1] = 2


def one_more_each(indices: torch.Tensor) -> None:
    """The first expert has one token, every other one more than the last."""
    each = torch.arange(17).repeat_interleave(torch.arange(1, 18))
    indices.copy_(each[: indices.numel()].view(indices.shape))


# Name: multiprocessors, sizes, dtype, features, who chooses which expert, schedule.
B, H = torch.bfloat16, torch.float16
CASES = {
    "NVFP4, several work tiles": (2, dict(Tq=150, N=288, M=160, E=4, K=2, blk=16, act=NVFP4), B, ("bias",), ragged, 1),
    "decoded, several work tiles": (2, dict(Tq=150, N=288, M=160, E=4, K=2, blk=16, act=NONE), B, ("bias",), ragged, 2),
    "MXFP4, several work tiles": (
        1, dict(Tq=60, N=1056, M=96, E=3, K=2, blk=32, act=MXFP4), H, ("gptoss", "limit", "bias"), as_sampled, 3,
    ),
    "float16 as two numbers": (
        1, dict(Tq=40, N=544, M=288, E=2, K=2, blk=32, act=NONE), H, ("gptoss", "interleaved"), as_sampled, 4,
    ),
    "MXFP8 of NVFP4 weights": (
        3, dict(Tq=70, N=160, M=288, E=2, K=1, blk=16, act=MXFP8), B, ("global_scale", "swizzled"), as_sampled, 0,
    ),
    "more tokens of an expert than a work tile": (
        4, dict(Tq=300, N=96, M=64, E=2, K=1, blk=16, act=NVFP4), B, ("global_scale", "swizzled"), as_sampled, 5,
    ),
    "more tokens than a work tile, decoded": (
        4, dict(Tq=300, N=96, M=64, E=2, K=1, blk=32, act=NONE), B, (), as_sampled, 5,
    ),
    "MXFP8, two row tiles": (
        2, dict(Tq=150, N=384, M=256, E=3, K=2, blk=32, act=MXFP8), B, ("gptoss", "interleaved", "swizzled"), ragged, 6,
    ),
    "MXFP4, an odd row tile behind pairs": (
        2, dict(Tq=200, N=320, M=192, E=2, K=2, blk=32, act=MXFP4), B, ("bias",), as_sampled, 7,
    ),
    "pairs of CTAs, several work tiles": (
        5, dict(Tq=420, N=288, M=160, E=3, K=2, blk=16, act=NVFP4), B, ("bias", "global_scale"), ragged, 1,
    ),
    "pairs, an odd row tile": (
        2, dict(Tq=300, N=544, M=96, E=1, K=1, blk=32, act=MXFP4), H, ("gptoss", "limit", "bias", "interleaved"),
        as_sampled, 9,
    ),
    "pairs, MXFP8, of one CTA no tokens": (
        4, dict(Tq=530, N=128, M=256, E=2, K=1, blk=32, act=MXFP8), B, ("gptoss", "interleaved", "swizzled"),
        few_of_one, 3,
    ),
    "neighbours with other tokens, of one expert, of two, of none": (
        4, dict(Tq=1030, N=128, M=96, E=2, K=1, blk=16, act=NVFP4), B, ("bias", "global_scale"), few_of_one, 2,
    ),
    "neighbours with other tokens, two row tiles, several stages": (
        4, dict(Tq=513, N=640, M=384, E=1, K=1, blk=32, act=MXFP8), H, ("interleaved", "swizzled"), as_sampled, 4,
    ),
    "pairs, all choices": (
        16, dict(Tq=260, N=192, M=128, E=5, K=5, blk=16, act=NVFP4), B, (), everyone, 0,
    ),
    "columns, NVFP4, several work tiles": (
        2, dict(Tq=22, N=2208, M=160, E=4, K=2, blk=16, act=NVFP4), B, ("bias", "global_scale"), as_sampled, 1,
    ),
    "columns, MXFP4, more tokens than a work tile": (
        3, dict(Tq=140, N=160, M=96, E=9, K=1, blk=32, act=MXFP4), H, ("gptoss", "limit", "bias", "interleaved"),
        one_expert, 2,
    ),
    "columns, MXFP8": (
        2, dict(Tq=30, N=384, M=256, E=6, K=2, blk=32, act=MXFP8), B, ("gptoss", "swizzled"), ragged_few, 3,
    ),
    "columns, every number of tokens up to 17": (
        5, dict(Tq=153, N=96, M=64, E=17, K=1, blk=16, act=NVFP4), B, ("swizzled",), one_more_each, 0,
    ),
    "columns, MXFP4, plain": (1, dict(Tq=40, N=96, M=96, E=3, K=1, blk=32, act=MXFP4), B, (), as_sampled, 6),
    "more choices than a warp has lanes": (
        2, dict(Tq=5, N=64, M=32, E=40, K=37, blk=16, act=NVFP4), B, (), as_sampled, 8,
    ),
    "no expert": (9, dict(Tq=50, N=64, M=32, E=2, K=1, blk=16, act=NVFP4), B, (), no_expert, 0),
}  # fmt: skip

# Of both products; pairs, neighbours, or both.
CLUSTERS = {
    "NVFP4, several work tiles": [2, 2],
    "MXFP8, two row tiles": [2, 2],
    "MXFP4, an odd row tile behind pairs": [2, 2],
    "pairs of CTAs, several work tiles": [4, 4],
    "pairs, an odd row tile": [2, 2],
    "pairs, MXFP8, of one CTA no tokens": [4, 2],
    "neighbours with other tokens, of one expert, of two, of none": [4, 4],
    "neighbours with other tokens, two row tiles, several stages": [4, 4],
    "pairs, all choices": [2, 2],
}


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(15)
@pytest.mark.seconds(300)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name, simulated, multiprocessors):
    sms, dims, dtype, features, choose, seed = CASES[name]
    multiprocessors(sms)
    args, kwargs = cases.make(dims, dtype, features, torch.Generator().manual_seed(len(name)))
    choose(args[2])
    with torch_attnkit.simulate("sm100"), simulated.settings(check=True, seed=seed), simulated.counting() as launches:
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    assert len(launches) == 3  # sorting, both products
    assert [launch.cluster[0] for launch in launches] == [1, *CLUSTERS.get(name, [1, 1])]
    kind = {"nvfp4": "mxf4nvf4", "mxfp4": "mxf4", "mxfp8": "mxf8f6f4"}.get(kwargs["activations"])
    kind = kind if by_scale(kwargs["format"], kwargs["activations"]) else "f16"
    assert all(set(launch.counters["flops"]) <= {kind} for launch in launches)
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype in (B, H) else a for a in args]
    check(f"fp4_moe {name}", got, reference(*args, **kwargs), reference(*double, **kwargs))


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("act", "experts"), [(NVFP4, 2), (NVFP4, 5), (NONE, 3)], ids=["rows", "columns", "decoded"])
def test_nothing_depends_on_the_schedule_or_the_neighbours(act, experts, simulated):
    """Slots of an expert are in any order; a token's result has the same bits whatever else is in its work tile."""
    dims = dict(Tq=40, N=96, M=96, E=experts, K=2, blk=16, act=act)
    args, kwargs = cases.make(dims, B, ("bias",), torch.Generator().manual_seed(1))
    found = []
    for seed in (0, 3, 7):
        with torch_attnkit.simulate("sm100"), simulated.settings(seed=seed):
            found.append(torch.ops.attnkit.fp4_moe(*args, **kwargs))
    with torch_attnkit.simulate("sm100"):
        half = torch.ops.attnkit.fp4_moe(args[0][20:], args[1][20:], args[2][20:], *args[3:], **kwargs)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0][20:], half)


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("T", [130, 15])
@pytest.mark.parametrize("activations", ["mxfp4", "mxfp8"])
def test_what_both_products_are_given_is_quantised_bit_for_bit(activations, T, simulated):
    """Weights that select, and a gate of 128, whose sigmoid is 1: every number on the way is exact, so the result is x
    quantised twice, in blocks of every magnitude."""
    N = 128
    g = torch.Generator().manual_seed(5)
    x = (
        torch.randn(T, N, generator=g) * 2.0 ** torch.randint(-60, 60, (T, 4), generator=g).repeat_interleave(32, 1)
    ).bfloat16()
    one = torch.zeros(1, N, N // 2, dtype=torch.uint8)
    one[0, range(N), torch.arange(N) // 2] = torch.tensor([0x02, 0x20], dtype=torch.uint8).repeat(N // 2)
    w13 = torch.cat([torch.zeros_like(one), one], 1)
    scales = [torch.full((1, rows, N // 32), 127, dtype=torch.uint8) for rows in (2 * N, N)]
    bias = torch.cat([torch.full((N,), 128.0), torch.zeros(N)]).bfloat16()[None]
    args = (x, torch.ones(T, 1), torch.zeros(T, 1, dtype=torch.int32), w13, scales[0], one, scales[1], None, None, bias)
    words = {"format": "mxfp4", "activations": activations}
    with torch_attnkit.simulate("sm100"):
        got = torch.ops.attnkit.fp4_moe(*args, **words)
    assert torch.equal(got, OPS["fp4_moe"].module("reference").reference(*args, **words)) and got.count_nonzero() > T


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("experts", [2, 3], ids=["rows", "columns"])
def test_nan_in_a_token_reaches_no_other(experts, simulated):
    """Lanes and columns that belong to no token of a work tile hold anything; here also NaN under a scale."""
    dims = dict(Tq=34, N=96, M=96, E=experts, K=1, blk=16, act=NVFP4)
    args, kwargs = cases.make(dims, B, ("limit",), torch.Generator().manual_seed(1))
    args[0][7, 5], args[0][9, 40] = torch.nan, torch.inf
    args[4][1, 3, 2] = 0x7F  # a weight's scale that is NaN
    with torch_attnkit.simulate("sm100"):
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    reference = OPS["fp4_moe"].module("reference").reference
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype is B else a for a in args]
    check("fp4_moe with NaN", got, reference(*args, **kwargs), reference(*double, **kwargs))


# Experts, tokens of each, features: tensor operations, bytes by TMA and warp instructions of FlashInfer 0.7.2's two
# kernels, as ``python -m bench.peers.flashinfer_experts --all`` counts them with the tiles that take the fewest bytes.
FLASHINFER = {
    (8, 1, 512): (805306368, 2064384, 296448),
    (8, 16, 512): (805306368, 2064384, 297984),
    (8, 128, 512): (805306368, 2064384, 324368),
    (8, 256, 512): (1610612736, 2359296, 677472),
    (8, 512, 512): (3221225472, 4718592, 1354944),
    (32, 128, 256): (1610612736, 4128768, 1093216),
    (32, 256, 256): (3221225472, 4718592, 2286944),
    (32, 512, 256): (6442450944, 9437184, 4296544),
}


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("experts", "each", "hidden"), FLASHINFER)
def test_no_more_work_than_flashinfer(experts, each, hidden, simulated):
    from bench.peers import flashinfer_experts

    launches = flashinfer_experts.own(flashinfer_experts.layer(experts, each, 4, hidden, 256))
    ours = flashinfer_experts.counts(launches[1:])
    operations, copied, instructions = FLASHINFER[experts, each, hidden]
    # Few tokens are columns, 8 at least; tiles of FlashInfer have 128 rows of them.
    assert ours["tensor operations"] == operations * min(max(each, 8), 128) // 128
    assert ours["instructions"] <= 1.05 * instructions
    # Where every number of theirs and of ours comes once, ours are more: theirs bring no tokens of the first product by
    # TMA, but scales.
    slots = experts * each
    one_pass = experts * 3 * 256 * hidden // 2 + slots * (hidden + 256) // 2
    assert ours["TMA read"] <= max(copied, one_pass)


def problem(tokens: int, format: str, activations: str, experts: int = 64) -> Problem:
    scales = {"nvfp4": 16, "mxfp4": 32}[format]
    up, down = (Weights(r, n, r * n // 2, n // 2, r * n // scales, n // scales, n // scales)
                for r, n in ((1920, 2880), (2880, 960)))  # fmt: skip
    return Problem(
        torch.device("cpu"), torch.bfloat16, torch.int32, tokens, 4, experts, up, down, format, activations, "silu",
        1.702, None, False, "linear",
    )  # fmt: skip


def test_the_workspace_does_not_grow_with_experts_times_tokens():
    for activations in ("nvfp4", "none"):
        few, many = (plan(problem(4096, "nvfp4", activations, experts), 148) for experts in (8, 256))
        assert few.x_rows == many.x_rows and few.h_rows == many.h_rows and few.x_rows[0] == 4 * 4096
        assert many.tiles == (4 * 4096 - 256) // TOKENS + 256 and few.tiles == (4 * 4096 - 8) // few.columns[0] + 8
    # Codes and scales of a row, padded to whole products and stages; behind those of h words and counters of a token.
    assert QuantizedRow(2880, "nvfp4").nbytes == 1440 + 12 * 16 and QuantizedRow(96, "mxfp4").code_bytes == 64
    assert QuantizedRow(256, "mxfp8").nbytes == 256 + 16
    assert few.h_rows[1] == 960 + (16 + 4 * 24) // 2
    assert plan(problem(1, "mxfp4", "mxfp4"), 148).x_rows == (4, (1440 + 12 * 8) // 2)
    assert plan(problem(1, "mxfp4", "none"), 148).x_rows == (4, 2880)


def test_clusters_of_four_leave_room():
    """Of many tokens; 128 multiprocessors of 148 are taken, so that no cluster waits for another to end."""
    pairs, single = (plan(problem(tokens, "nvfp4", "nvfp4"), 148) for tokens in (64 * 256 // 4, 64 * 64 // 4))
    assert (pairs.columns, pairs.row_warps, pairs.blocks[1:]) == ((256,) * 3, (32, 32), (128, 128))
    assert (single.columns, single.row_warps, single.blocks[1:]) == ((128,) * 3, (32, 32), (148, 148))


def test_a_product_shares_what_it_can():
    """Of a cluster of four; an odd number of work tiles a tile of tokens has no neighbours with other rows, so they
    have other tokens, if an expert has tiles enough."""
    given = problem(64 * 512 // 4, "nvfp4", "nvfp4")
    odd = Weights(1280, 960, 1280 * 480, 480, 1280 * 60, 60, 60)  # 5 times two row tiles
    both, other = plan(given, 148), plan(replace(given, down=odd), 148)
    assert (both.columns, both.row_warps) == ((256,) * 3, (32, 32))
    assert (other.columns, other.row_warps, other.blocks[1:]) == ((256, 256, 512), (32, 16), (128, 128))
    fewer = plan(replace(given, tokens=64 * 511 // 4, down=odd), 148)
    assert (fewer.columns, fewer.row_warps, fewer.blocks[1:]) == ((256,) * 3, (32, 16), (128, 148))


def test_loads_of_scales_are_as_wide_as_rows_allow():
    assert plan(problem(8, "nvfp4", "nvfp4"), 148).scale_vectors == (4, 4)  # 180 and 60 bytes a row
    assert plan(problem(8, "mxfp4", "none"), 148).scale_vectors == (2, 2)  # 90 and 30


def test_which_products_are_of_codes():
    formats = ("nvfp4", "mxfp4")
    assert [(f, a) for f in formats for a in ("none", *formats, "mxfp8") if by_scale(f, a)] == [
        ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8"),
    ]  # fmt: skip
    assert plan(problem(8, "mxfp4", "mxfp8"), 148).code_alignment == 16  # 2880 numbers are no multiple of 128
    assert bf16_parts("f16", "none") == 2 and bf16_parts("f16", "mxfp8") == bf16_parts("bf16", "none") == 1
