"""The indexer's kernel by ``mma.sync``: shapes of its products, where keys lie, what a CTA takes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import torch_attnkit
from tests.kernels.indexer.test_indexer_on_blackwell import E4M3, exact, integers, keys_anywhere, problem
from torch_attnkit.core.spec import short
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.kernels.indexer.sm80 import plan
from torch_attnkit.kernels.indexer.sm100.plan import MOST_TOKENS
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

ARCHS = ("sm80", "sm89", "sm120")
FORMATS = (("none", torch.bfloat16), ("fp8", E4M3), ("mxfp4", torch.uint8))


@pytest.mark.sample(17)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("T", [1, 5, 9])
@pytest.mark.parametrize(("dtype", "D"), [(torch.bfloat16, 64), (torch.float16, 128), (E4M3, 64), (E4M3, 128)])
@pytest.mark.parametrize("H", [1, 8, 17, 64, 65, 128])
def test_every_product(H, dtype, D, T, arch):
    """Rows of 64, 128 and 256 bytes; an odd number of products; more tokens than stages, and fewer."""
    exact(T, H, D, 300, dtype, seed=T, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_ring_of_queries_goes_round(arch):
    exact(45, 64, 128, 40, torch.bfloat16, seed=2, arch=arch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("step", "at"), [(136, 0), (132, 0), (130, 0), (129, 1), (128, 1)])
def test_keys_may_lie_anywhere(step, at, arch):
    keys_anywhere(step, at, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_e4m3_is_multiplied_as_it_is_where_the_target_can(arch):
    done = exact(5, 8, 128, 128, E4M3, arch=arch).counters["flops"]
    (name,) = (name for name, count in done.items() if count)
    assert ("e4m3" in name) == LIMITS[arch].e4m3 == (arch != "sm80")
    assert done[name] == 2 * 256 * 4 * 8 * 128  # of five tokens one sees nothing


def test_a_selection_is_two_launches():
    gen = torch.Generator().manual_seed(0)
    args = integers(gen, 6, 4, 64).half(), integers(gen, 2, 300, 64).half(), integers(gen, 6, 4)
    lengths = torch.tensor([300, 0, 1, 299, 128, 129], dtype=torch.int32)
    want = torch.ops.attnkit.indexer_select(*args, lengths, topk=100)
    with torch_attnkit.simulate("sm89"), ptx.settings(check=True), ptx.counting() as launches:
        got = torch.ops.attnkit.indexer_select(*args, lengths, topk=100)
    assert torch.equal(got, want) and len(launches) == 2


def test_a_token_takes_few_instructions_and_products():
    """64 heads of 128 in bf16 against 256 keys, 24 tokens more, of which a fifth sees nothing. Seen: 3,028 of PTX a
    token, 3.4 million operations, and 0.2 % of accesses to shared memory that wait for a bank."""
    one, more = (exact(T, 64, 128, 256, torch.bfloat16, arch="sm120").counters for T in (8, 32))
    assert more["instructions"] - one["instructions"] <= 24 * 3_100
    assert sum(more["flops"].values()) - sum(one["flops"].values()) <= 24 * 2 * 256 * 64 * 128
    assert more["shared_wavefronts"] <= 1.02 * more["shared_least_wavefronts"]


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_every_plan_fits_in_99_kb(format, dtype, e4m3):
    for tokens, heads, scaled, elements in itertools.product((1, 100), range(1, 129), (False, True), plan.DIMS[format]):
        dim = 2 * elements if format == "mxfp4" else elements
        p = dataclasses.replace(problem(tokens, heads, format=format, dtype=dtype), dim=dim)
        product = plan.product_dtype(p, e4m3)
        name = short(product)
        stored = format if format == "mxfp4" else short(dtype)
        cut = plan.cut(p, product.itemsize)
        c = plan.Config(stored, name, "bf16", heads, dim, *cut, False, True, scaled, True, 16)
        lists = 8 * MOST_TOKENS + 256
        assert c.stages * (c.stage_bytes + 16 * c.pitch * (1 + scaled)) + lists <= LIMITS["sm120"].shared
        assert c.stages >= 2 and c.keys == (256 if tokens > plan.FEW else 128)
        assert c.threads >= c.columns  # which have a weight each
        assert c.threads % (2 * c.row_bytes // plan.CHUNK) == 0  # all heads of a thread are even, or odd
        assert c.expansion * c.key_bytes == c.row_bytes and c.key_bytes % plan.GROUP == 0
