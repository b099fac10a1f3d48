"""How decode launches are cut: every plan fits on its SM, and the choices that were measured or counted are made."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import torch_attnkit
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.kernels.decode import plan as shared_plan
from torch_attnkit.kernels.decode.config import Fp8KvConfig, MmaConfig
from torch_attnkit.kernels.decode.plan import FP8_KV_HEADS, Plan
from torch_attnkit.kernels.decode.problem import LATENTS, Problem, Strides
from torch_attnkit.kernels.decode.sm90 import plan as hopper
from torch_attnkit.kernels.decode.sm90.config import MlaConfig, WgmmaConfig
from torch_attnkit.kernels.decode.sm100 import plan as blackwell
from torch_attnkit.kernels.decode.sm100.config import Tcgen05Config
from torch_attnkit.kernels.decode.traces import trace_mla, trace_mma, trace_tcgen05, trace_wgmma
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle.compare import check

SMS, SHARED = 132, 228 << 10  # multiprocessors of an H200, and bytes of shared memory of each
B200_SMS, TENSOR_COLUMNS, CLUSTER = 148, 512, 8  # CTAs of a cluster that any GPU can place
NOWHERE = Strides(0, 0, 0)


def problem(dim: int, dim_v: int, group: int, keys: int, groups: int, page: int = 0, size: int = 2) -> Problem:
    """``groups`` KV heads of all sequences, each of ``group`` query heads and at most ``keys`` keys."""
    dtype = torch.bfloat16 if size == 2 else torch.float8_e4m3fn
    sizes = (1, groups * group, groups, dim, dim_v, keys, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
    return Problem(dtype, torch.device("cpu"), *sizes, page=page, pages=int(page > 0))


def plan(*sizes: int, page: int = 0, same: bool = False) -> Plan:
    return hopper.plan(problem(*sizes, page=page), SMS, same=same)


@pytest.mark.parametrize(("dim", "dim_v"), hopper.HEADS)
def test_a_plan_fits(dim, dim_v):
    """All blocks of a launch are on the device at once, which the merge of a second kernel counts on for its speed."""
    configs = {trace_mma: MmaConfig, trace_wgmma: WgmmaConfig, trace_mla: MlaConfig}
    sizes = itertools.product((1, 8, 9, 70), (1, 128, 8192, 131072), (1, 8, 1024), (0, 16), (False, True))
    for group, most_keys, groups, page, same in sizes:
        p = plan(dim, dim_v, group, most_keys, groups, page=page, same=same)
        config = configs[p.trace](SimpleNamespace(width=16), **p.sizes)
        per_sm = p.blocks // SMS
        assert config.stages >= 2 and p.blocks == per_sm * SMS
        assert per_sm <= config.blocks_per_sm, p
        assert per_sm * (config.shared_bytes + 1024) <= SHARED, p
        assert p.floats >= 2 * p.blocks * config.split.floats and p.counters >= p.blocks
        assert bool(p.combine_blocks) == config.combine and p.combine_blocks <= SMS
        assert p.head_blocks * config.heads >= group > (p.head_blocks - 1) * config.heads
        assert p.head_blocks % p.concurrent == 0 and p.blocks % p.concurrent <= p.blocks // 16


@pytest.mark.parametrize(("dim", "dim_v"), FP8_KV_HEADS)
@pytest.mark.parametrize("module", [hopper, blackwell])
@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_over_an_fp8_cache_fits(dim, dim_v, module, size):
    """E4M3 queries of Blackwell have a kernel of their own."""
    launches = itertools.product((1, 8, 9, 70), (1, 128, 8192, 131072), (1, 8, 1024), (0, 1, 16, 64))
    for group, most_keys, groups, page in launches:
        found = replace(problem(dim, dim_v, group, most_keys, groups, page, size), fp8_kv=True)
        if size == 1 and module is blackwell and module.HEADS[dim, dim_v]:
            assert module.plan(found, SMS).trace == trace_tcgen05
            continue
        p = module.plan(found, SMS)
        sizes = {name: value for name, value in p.sizes.items() if name != "fp8_kv"}
        config, per_sm = Fp8KvConfig(SimpleNamespace(width=8 * size), **sizes), p.blocks // SMS
        assert p.trace == trace_mma and p.sizes["fp8_kv"] and config.stages >= 2 and config.itemsize == 1
        assert per_sm <= config.blocks_per_sm and per_sm * (config.shared_bytes + 1024) <= SHARED, p
        assert p.head_blocks * config.heads >= group > (p.head_blocks - 1) * config.heads
        # A warp looks the pages of a tile's keys up with a lane each.
        assert config.keys <= 32 or not page


@pytest.mark.parametrize(
    ("dim", "group", "most_keys", "groups", "page", "trace", "combine"),
    [
        (128, 4, 1024, 8, 0, trace_mma, False),
        (128, 4, 8192, 8, 0, trace_mma, False),
        (128, 4, 131072, 8, 0, trace_wgmma, False),
        (128, 4, 131072, 8, 16, trace_wgmma, False),
        (128, 4, 8192, 1024, 16, trace_mma, False),
        (64, 8, 128, 1024, 0, trace_mma, False),
        (256, 8, 8192, 2, 0, trace_mma, True),
        (256, 2, 8192, 8, 0, trace_wgmma, False),
        (256, 2, 8192, 128, 16, trace_mma, False),
        (256, 2, 8192, 1024, 16, trace_mma, False),
        (128, 16, 8192, 4, 0, trace_wgmma, True),
        (512, 64, 8192, 16, 0, trace_wgmma, True),
        (512, 8, 8192, 16, 0, trace_wgmma, False),
        (512, 8, 1024, 16, 0, trace_mma, True),
        (512, 8, 8192, 16, 16, trace_mma, True),
    ],
)
def test_the_choices_that_were_measured(dim, group, most_keys, groups, page, trace, combine):
    p = plan(dim, dim, group, most_keys, groups, page=page)
    assert (p.trace, p.sizes["combine"]) == (trace, combine)


def test_keys_that_are_values_have_a_kernel():
    """And heads beyond what a block has go along the keys concurrently."""
    p = plan(512, 512, 128, 8192, 16, same=True)
    assert (p.trace, p.head_blocks, p.concurrent) == (trace_mla, 2, 2)


@pytest.mark.parametrize("size", [1, 2], ids=["E4M3", "16-bit"])
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [*((dim, dim) for dim in (64, 128, 256, 512)), *LATENTS],
)
def test_a_blackwell_plan_for_many_heads_fits(dim, dim_v, size):
    for group, most_keys, groups, page in itertools.product(
        (9, 16, 17, 64, 65, 128, 129, *((1, 8) if size == 1 else ())),
        (0, 1, 128, 1152, 131072),
        (1, 8, 1024),
        (0, 16, 48, 256),
    ):
        for same in (False, True):
            p = blackwell.plan(problem(dim, dim_v, group, most_keys, groups, page, size), B200_SMS, same=same)
            assert p.trace == trace_tcgen05
            config = Tcgen05Config(SimpleNamespace(width=8 * size), **p.sizes)
            ctas = config.sides * p.combine_blocks
            assert 1 <= ctas <= CLUSTER and ctas * p.blocks <= B200_SMS
            # A tile's buffers are full at once; what else is in shared memory takes less than 4 KB.
            assert config.stages >= config.parts and config.shared.nbytes <= SHARED - (5 << 10)
            assert config.tensor_memory.columns <= TENSOR_COLUMNS
            assert page % config.box == 0 and config.boxes % config.sides == 0 and config.boxes <= 32
            assert p.floats >= 2 * p.blocks * config.sides * config.split.floats and p.counters >= ctas * p.blocks
            heads = config.heads * config.sides
            assert p.head_blocks * heads >= group > (p.head_blocks - 1) * heads
        # Groups are units of work only where one cluster's CTAs have a tile each, and are all attended then.
        assert not p.whole or (
            p.least_tiles == 1 and most_keys <= 128 * p.combine_blocks and p.blocks <= groups * p.head_blocks
        )


@pytest.mark.parametrize(("dim", "dim_v"), LATENTS)
def test_a_hopper_plan_for_latents_fits(dim, dim_v):
    for group, most_keys, groups, page in itertools.product(
        (1, 8, 16, 64, 65, 128, 129), (1, 128, 513, 131072), (1, 8, 1024), (0, 16, 48, 64)
    ):
        for same in (False, True):
            p = hopper.plan(problem(dim, dim_v, group, most_keys, groups, page), SMS, same=same)
            assert p.trace == trace_mla
            config = MlaConfig(SimpleNamespace(width=16), **p.sizes)
            assert config.threads == 512 and config.shared_bytes <= SHARED - 1024 and config.blocks_per_sm == 1
            assert all(region.offset % 1024 == 0 for region in (config.shared.ring, config.shared.probabilities))
            assert page % config.box == 0 and config.box * config.boxes == config.keys and p.blocks == SMS
            assert p.head_blocks * config.heads >= group > (p.head_blocks - 1) * config.heads
            assert p.floats >= 2 * p.blocks * config.split.floats and p.counters >= p.blocks


@pytest.mark.parametrize(
    ("dim", "dim_v", "group", "keys", "groups", "trace", "sides", "ctas", "clusters"),
    [
        (512, 512, 128, 1152, 1, trace_tcgen05, 2, 8, 3),
        (512, 512, 128, 8192, 128, trace_tcgen05, 2, 2, 74),
        (512, 512, 64, 131072, 1, trace_tcgen05, 1, 8, 18),
        (128, 128, 16, 1024, 8, trace_tcgen05, 1, 8, 8),
        (512, 512, 8, 8192, 1, trace_tcgen05, 1, 8, 10),
        (128, 128, 8, 8192, 8, trace_mma, None, None, None),
        (192, 128, 128, 8192, 8, trace_mma, None, None, None),
    ],
)
def test_the_choices_for_blackwell(dim, dim_v, group, keys, groups, trace, sides, ctas, clusters):
    p = blackwell.plan(problem(dim, dim_v, group, keys, groups), B200_SMS)
    assert (p.trace, p.sizes.get("sides")) == (trace, sides)
    if sides:
        assert (sides * p.combine_blocks, p.blocks) == (ctas, clusters)


@pytest.mark.simulator
def test_long_pages_have_tiles_of_32_keys(monkeypatch):
    """As long caches without pages."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    assert hopper.plan(problem(128, 128, 4, 8192, 8, page=64), SMS).sizes["keys"] == 32
    assert hopper.plan(problem(128, 128, 4, 8192, 8, page=16), SMS).sizes["keys"] == 16
    assert hopper.plan(problem(128, 128, 4, 8192, 1024, page=64), SMS).sizes["keys"] == 16
    monkeypatch.setattr(shared_plan, "_LONG", 0)
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=gen).bfloat16() for s in ((2, 8, 128), (20, 64, 2, 128), (20, 64, 2, 128)))
    table, kv_len = torch.randperm(20, generator=gen).to(torch.int32).view(2, 10), torch.tensor([630, 77]).int()
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=1):
        got = torch.ops.attnkit.sdpa_decode_paged(q, k, v, table, kv_len)
    reference = OPS["sdpa_decode_paged"].module("reference").reference
    low = reference(q, k, v, table, kv_len)
    high = reference(q.double(), k.double(), v.double(), table, kv_len)
    for ours, a, b in zip(got, low, high, strict=True):
        check("pages", ours, a, b)
