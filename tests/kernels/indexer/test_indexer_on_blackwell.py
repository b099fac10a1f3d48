"""The indexer's kernel on a simulated B200: shapes of its products, where keys lie, how exact sums of E4M3 are."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.indexer.problem import Problem
from torch_attnkit.kernels.indexer.sm100 import plan
from torch_attnkit.kernels.prefill.problem import Layout
from torch_attnkit.ops.indexer_scores.reference import reference
from torch_attnkit.oracle import compare
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

op = torch.ops.attnkit.indexer_scores
E4M3 = torch.float8_e4m3fn


def simulated(*args, seed=0, arch="sm100", **kwargs):
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        return op(*args, **kwargs), launches


def integers(gen, *shape):
    return torch.randint(-2, 3, shape, generator=gen).float()


def exact(T, H, D, S, dtype, seed=0, R=1, arch="sm100"):
    """A call whose scores are exact in float32, and these; lengths end amid a block, and one is 0."""
    gen = torch.Generator().manual_seed(H + D)
    q, k, w = integers(gen, T, H, D), integers(gen, R, S, D), integers(gen, T, H)
    k_len = torch.tensor([S, 0, 1, S - 1, S // 2 + 3], dtype=torch.int32).repeat(-(-T // 5))[:T]
    args = q.to(dtype), k.to(dtype), w, k_len
    kwargs = {}
    if dtype == E4M3:
        args, kwargs = (*args, None, None, None, torch.ones(R, S, 1)), dict(format="fp8")
    got, launches = simulated(*args, seed=seed, arch=arch, **kwargs)
    assert len(launches) == 1
    assert torch.equal(got, reference(*args, **kwargs))
    return launches[0]


def keys_anywhere(step, at, arch="sm100"):
    """Rows that start at multiples of 4, of 2 and of one byte, in a buffer of NaN."""
    gen = torch.Generator().manual_seed(0)
    for dtype, D in ((E4M3, 128), (torch.bfloat16, 64)):
        q, k, w = (integers(gen, *shape) for shape in ((3, 7, D), (2, 90, D), (3, 7)))
        q, scale = q.repeat(2, 1, 1).to(dtype), (torch.ones(2, 90, 1),)
        storage = torch.full((2 * 90 * step + 8,), torch.nan).to(dtype)
        keys = storage[at : at + 2 * 90 * step].view(2, 90, step)[..., :D]
        keys.copy_(k.to(dtype))
        args = q, keys, w.repeat(2, 1), torch.tensor([90, 3, 0, 1, 89, 90], dtype=torch.int32)
        kwargs = dict(format="fp8") if dtype == E4M3 else {}
        args = (*args, None, None, None, *scale) if dtype == E4M3 else args
        assert torch.equal(simulated(*args, arch=arch, **kwargs)[0], reference(*args, **kwargs))


@pytest.mark.sample(17)
@pytest.mark.parametrize("T", [1, 5, 9])
@pytest.mark.parametrize(("dtype", "D"), [(torch.bfloat16, 64), (torch.float16, 128), (E4M3, 64), (E4M3, 128)])
@pytest.mark.parametrize("H", [1, 16, 33, 64, 65, 128])
def test_every_product(H, dtype, D, T):
    """Rows of 64, 128 and 256 bytes; one token or two of a product, odd numbers of them; one buffer of sums or two."""
    exact(T, H, D, 300, dtype, seed=T)


def test_the_ring_of_queries_goes_round():
    exact(45, 64, 128, 40, torch.bfloat16, seed=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("step", "at"), [(132, 0), (130, 0), (129, 1), (128, 1)])
def test_keys_may_lie_anywhere(step, at):
    keys_anywhere(step, at)


@pytest.mark.parametrize("arch", ["sm80", "sm100"])
def test_sums_of_e4m3_are_those_of_float32(arch):
    """The tolerance of E4M3 is Hopper's, with its 14 bits; here results keep to that of float32, which is tighter."""
    gen = torch.Generator().manual_seed(3)
    q, k, w = (torch.randn(*shape, generator=gen) for shape in ((4, 64, 128), (1, 200, 128), (4, 64)))
    args = (q.to(E4M3), k.to(E4M3), w, torch.full((4,), 200, dtype=torch.int32), None, None, None)
    args = (*args, torch.rand(1, 200, 1, generator=gen) + 0.5)
    wide = [*args[:2], w.double(), *args[3:]]
    got, _ = simulated(*args, format="fp8", arch=arch)
    compare.check("scores", got, reference(*args, format="fp8"), reference(*wide, format="fp8"))


def test_a_token_takes_few_instructions_and_products():
    """64 heads of 128 in E4M3 against 256 keys, 24 tokens more. Seen: 1,767 of PTX a token, moves of registers among
    them, and 4.2 million operations: no column without a head."""
    one, more = exact(8, 64, 128, 256, E4M3), exact(32, 64, 128, 256, E4M3)
    instructions, products = (
        (more.counters[name] - one.counters[name]) / 24 if name == "instructions"
        else (more.counters["flops"]["f8f6f4"] - one.counters["flops"]["f8f6f4"]) / 24
        for name in ("instructions", "flops")
    )  # fmt: skip
    assert instructions <= 1_800
    assert products <= 2 * 256 * 64 * 128


def problem(tokens, heads, entries=4096, format="fp8", dtype=E4M3):
    q = Layout((tokens, heads, 128), (heads * 128, 128, 1))
    return Problem(
        device=torch.device("cpu"), format=format, dtype=dtype, weights=torch.bfloat16, tokens=tokens, requests=1,
        entries=entries, heads=heads, dim=128, q=q, q_scale_steps=(), k_steps=(8192, 128), page=64, ids=False,
        paged=True, q_scale=False,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(("stored", "format", "dtype"), [
    ("f8e4m3", "fp8", E4M3), ("mxfp4", "mxfp4", torch.uint8), ("bf16", "none", torch.bfloat16),
])  # fmt: skip
def test_blocks_fit_into_both_memories(stored, format, dtype, tokens, heads):
    cut = plan.shape(problem(tokens, heads, format=format, dtype=dtype), stored)
    c = plan.Config(stored, "bf16", heads, 128, *cut, False, True, False, False, 16)
    assert c.first_scales + c.scale_columns <= c.tensor_columns <= 512 // c.blocks
    assert c.blocks * (plan.KEYS * c.row_bytes + c.stages * c.stage_bytes) <= 208 << 10
    assert c.stages >= 2 and (c.buffers == 2 or heads > 64 or tokens == 1)
    assert c.blocks == 2 or tokens > 1 or heads > 64
