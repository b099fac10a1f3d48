"""Routed experts by ``mma.sync``, with few tokens each on Hopper, with any before it, checked as they run; what is
decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda import driver
from torch_attnkit.formats import e2m1, fp8
from torch_attnkit.kernels.grouped_gemm.problem import BULK_ROWS, STRADDLING, Problem, Weights
from torch_attnkit.kernels.grouped_gemm.sm90.plan import plan
from torch_attnkit.ops.fp4_moe import cases
from torch_attnkit.oracle.compare import check

ARCHS = pytest.mark.parametrize("arch", ["sm90", "sm80"])
_ENDLESS = 4_000_000  # instructions of a launch that is caught in a loop; without it has a tenth at most


@pytest.fixture
def simulated():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    return pytest.importorskip("torch_attnkit.sim.ptx")


@pytest.fixture
def multiprocessors(monkeypatch):
    """Plans are made for so many, which decides over how many warps K is sliced."""

    def chosen(count: int) -> None:
        monkeypatch.setattr(driver, "_SIMULATED_SMS", count)
        driver.sm_count.cache_clear()
        dispatch._PLANS["fp4_moe"].clear()

    yield chosen
    driver.sm_count.cache_clear()
    dispatch._PLANS["fp4_moe"].clear()


def reference(args, kwargs, *, double: bool) -> torch.Tensor:
    models = (torch.bfloat16, torch.float16)
    args = [a.double() if double and isinstance(a, torch.Tensor) and a.dtype in models else a for a in args]
    return OPS["fp4_moe"].module("reference").reference(*args, **kwargs)


def judged(name: str, args, kwargs, got: torch.Tensor) -> None:
    check(f"fp4_moe {name}", got, reference(args, kwargs, double=False), reference(args, kwargs, double=True))


# Multiprocessors, sizes, dtype, features.
SHAPES = {
    "rows of eight warps": (1, dict(Tq=19, N=544, M=288, E=12, K=3), torch.bfloat16, ("global_scale", "bias")),
    "two launches for the products": (1, dict(Tq=40, N=544, M=288, E=12, K=2), torch.bfloat16, ("gptoss", "bias")),
    "slices of two warps": (9, dict(Tq=3, N=544, M=288, E=5, K=2, blk=32), torch.bfloat16, ("interleaved",)),
    "slices of four warps": (132, dict(Tq=2, N=1056, M=544, E=4, K=1), torch.bfloat16, ("swizzled",)),
    "float16 as two numbers": (2, dict(Tq=17, N=288, M=96, E=2, K=2, blk=32), torch.float16, ("gptoss", "limit")),
    "four groups of tokens": (3, dict(Tq=46, N=96, M=544, E=4, K=1), torch.bfloat16, ()),
    "a ring of two stages": (1, dict(Tq=30, N=2080, M=64, E=1, K=1), torch.float16, ()),
    "scales by two copies": (1, dict(Tq=9, N=576, M=192, E=5, K=3, blk=32), torch.bfloat16, ("bias",)),
    "scales by a copy, slices of two warps": (
        7, dict(Tq=7, N=576, M=192, E=3, K=2, blk=32, act=3), torch.bfloat16, ("interleaved", "limit"),
    ),
    "an odd number of blocks, slices of two warps": (
        9, dict(Tq=3, N=528, M=304, E=5, K=2), torch.bfloat16, ("interleaved", "swizzled"),
    ),
    "more tiles of tokens than a group has": (3, dict(Tq=140, N=96, M=96, E=3, K=2, blk=32), torch.float16, ("bias",)),
    "an odd number of blocks, rounded": (1, dict(Tq=19, N=112, M=272, E=4, K=2, act=1), torch.float16, ("bias",)),
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(8)
@ARCHS
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_reference(simulated, multiprocessors, name, arch):
    count, dims, dtype, features = SHAPES[name]
    multiprocessors(count)
    gen = torch.Generator().manual_seed(len(name))
    args, kwargs = cases.make(dict(blk=16, act=0) | dims, dtype, features, gen)
    with (
        torch_attnkit.simulate(arch),
        simulated.settings(check=True, seed=len(name)),
        simulated.counting() as launches,
    ):
        got = torch.ops.attnkit.fp4_moe(*args, **kwargs)
    assert not any("Permute" in launch.kernel for launch in launches), "by wgmma"
    # Rows of x, with the sort unless slots are few; and the products, on Hopper of little work together.
    assert len(launches) == (2 if arch == "sm90" and "two launches" not in name else 3)
    judged(name, args, kwargs, got)


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(4)
@ARCHS
@pytest.mark.parametrize("tokens, experts", [(7, 2), (33, 6)], ids=["sorted by warps", "sorted by a block"])
def test_the_same_bits_under_any_schedule_and_no_memory_of_the_call_before(
    simulated, multiprocessors, tokens, experts, arch
):
    """Blocks come in another order with every seed, slots lie in another order in their experts, and counters must be
    back at zero."""
    multiprocessors(5)
    gen = torch.Generator().manual_seed(3)
    dims = dict(Tq=tokens, N=160, M=64, E=experts, K=2, blk=16, act=0)
    args, kwargs = cases.make(dims, torch.bfloat16, (), gen)
    args[2][3] = -1  # a token without experts, whatever its weights
    args[1][3] = torch.nan
    args[2][4:9] = 0  # an expert twice
    results = []
    for seed in range(4):
        # Fewer are resident than there are blocks: none may wait for one that has yet to begin.
        few = dict(processors=(seed + 3) % 5, limit=_ENDLESS)
        with torch_attnkit.simulate(arch), simulated.settings(check=True, seed=seed, **few):
            results.append(torch.ops.attnkit.fp4_moe(*args, **kwargs))
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert not results[0][3].any()
    judged("schedules", args, kwargs, results[0])


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
@pytest.mark.sample(2)
@ARCHS
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.proof
def test_every_scale_and_code_is_decoded(simulated, format, arch):
    """One token that picks a single number of each row: out is a table of what was decoded. Of MXFP4 the scales are
    those that bf16 holds beside the power of two that decoding leaves: 2^-69 to 2^63."""
    codes = torch.arange(16, dtype=torch.uint8)
    block, scales = 16, torch.cat((torch.arange(0x7F), 0x80 + torch.arange(0x7F)))  # all but NaN
    if format == "mxfp4":
        block, scales = 32, torch.arange(58, 191)
    rows = len(scales) // 32 * 32 * len(codes) // 32  # of 32 numbers
    N, M = rows * 32, 32
    scales = scales[: N // len(codes)].repeat_interleave(len(codes)).to(torch.uint8)  # (N)
    w2 = torch.zeros(1, N, M // 2, dtype=torch.uint8)
    w2[0, :, 0] = codes.repeat(N // len(codes))  # the first number of a row
    w2_scale = scales[None, :, None].expand(1, N, M // block).contiguous()
    w13 = torch.zeros(1, 2 * M, N // 2, dtype=torch.uint8)
    x = torch.zeros(1, N, dtype=torch.bfloat16)
    bias13 = torch.zeros(1, 2 * M, dtype=torch.bfloat16)
    bias13[0, 0], bias13[0, M] = 64.0, 1 / 64  # h = (1, 0, 0 ...): silu(64) is 64
    args = (
        x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), w13,
        torch.full((1, 2 * M, N // block), 0x38, dtype=torch.uint8), w2, w2_scale, None, None, bias13,
    )  # fmt: skip
    with torch_attnkit.simulate(arch):
        got = torch.ops.attnkit.fp4_moe(*args, format=format)
    decode = fp8.e4m3_decode if format == "nvfp4" else fp8.ue8m0_decode
    want = e2m1.decode(w2[0, :, 0] & 15) * decode(scales)
    assert torch.equal(got[0].float(), want.to(torch.bfloat16).float())
    w2_scale.fill_(0x7F if format == "nvfp4" else 0xFF)
    with torch_attnkit.simulate(arch):
        assert bool(torch.ops.attnkit.fp4_moe(*args, format=format).isnan().all())


def experts(
    tokens: int, hidden: int, intermediate: int, experts: int, choices: int, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """Of a model in NVFP4."""
    up, down = (
        Weights(rows, k, rows * k // 2, k // 2, rows * k // 16, k // 16, k // 16)
        for rows, k in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    return Problem(
        torch.device("cpu"), dtype, torch.int32, tokens, choices, experts, up, down, "nvfp4", "none", "silu", 1.702,
        10.0, False, "linear",
    )  # fmt: skip


def problem(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """DeepSeek-V4-Flash's experts."""
    return experts(tokens, 4096, 2048, 256, 6, dtype)


def test_few_tokens_slice_k_and_work_tiles_are_as_wide_as_experts_have_tokens():
    plans = {tokens: plan(problem(tokens), 132) for tokens in (1, 8, 128, 256, 500)}
    assert plans[1].row_warps == 4  # 384 work tiles for 132 multiprocessors, where 192 would leave 72 idle
    assert plans[8].row_warps == 8  # as many stages in all, and half as many starts
    assert plans[128].row_warps == 8
    assert [p.columns for p in plans.values()] == [8, 8, 8, 16, 32]
    assert plan(problem(900, torch.float16), 132).row_warps == 8


def test_rows_of_a_work_tile_are_those_that_were_faster_on_an_h200():
    """Microseconds with 128 and with 64, by tokens and sizes: of some, K fills stages of 64 rows, of others not."""
    qwen3_next, qwen3, gpt_oss = (2048, 512, 512, 10), (2048, 768, 128, 8), (2880, 2880, 128, 4)
    measured = {
        (4, *qwen3_next): (38.7, 47.0), (8, *qwen3_next): (65.4, 80.5), (12, *qwen3_next): (83.4, 107.4),
        (1, *qwen3): (22.5, 20.9), (4, *qwen3): (38.8, 44.5), (16, *qwen3): (86.0, 106.3),
        (1, *gpt_oss): (34.2, 29.7), (2, *gpt_oss): (46.5, 43.0), (8, *gpt_oss): (116.5, 117.5),
    }  # fmt: skip
    for sizes, (many, few) in measured.items():
        assert plan(experts(*sizes), 132).row_warps == (8 if many < few else 4), sizes


def test_rows_of_codes_that_tma_does_not_take_are_those_that_start_or_end_at_odd_multiples_of_8_bytes():
    up, down = problem(8).up, problem(8).down
    odd = Weights(4096, 4080, 4096 * 2040, 2040, 4096 * 255, 255, 255)
    apart = replace(odd, row=2048, expert=4096 * 2048)
    many = 6000
    for tokens in (8, many):
        p = problem(tokens)
        alignments = [
            plan(replace(p, up=u, down=d), 132).code_alignment
            for u, d in ((up, down), (odd, down), (up, odd), (apart, down), (replace(up, row=2056), down))
        ]
        assert alignments == [16, 8, 8, 8, 8]


def test_rows_of_scales_that_straddle_words_come_together_where_that_costs_no_stage():
    rows = 2880  # GPT-OSS: 90 scales in each
    up, down = (Weights(n, 2880, n * 1440, 1440, n * 90, 90, 90) for n in (2 * rows, rows))
    for tokens, columns in ((64, 8), (256, 16)):
        oss = replace(problem(tokens), experts=128, top_k=4, up=up, down=down, format="mxfp4")
        made = plan(oss, 132)
        assert (made.columns, made.scale_vectors, made.scale_alignments) == (columns, (BULK_ROWS,) * 2, (16, 16))
    quantised = plan(replace(oss, activations="mxfp8"), 132)
    assert quantised.scale_vectors == (STRADDLING,) * 2  # rounding takes the room
    apart = replace(up, scale_row=92, scale_expert=92 * up.rows)
    assert plan(replace(oss, up=apart), 132).scale_vectors == (2, STRADDLING)
