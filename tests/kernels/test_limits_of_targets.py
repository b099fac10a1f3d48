"""No plan for a target asks for more than the least GPU has that runs what is compiled for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.cuda.smem import RESERVED
from torch_attnkit.kernels.batched_gemm import plan as batched
from torch_attnkit.kernels.batched_gemm.problem import Fp4Problem
from torch_attnkit.kernels.decode.config import Fp8KvConfig, MmaConfig
from torch_attnkit.kernels.decode.plan import FP8_KV_HEADS
from torch_attnkit.kernels.decode.problem import Problem, Strides
from torch_attnkit.kernels.decode.sm80 import plan as decode
from torch_attnkit.kernels.decode.sm90 import plan as hopper
from torch_attnkit.kernels.decode.traces import trace_mma
from torch_attnkit.kernels.grouped_gemm.problem import Problem as Experts
from torch_attnkit.kernels.grouped_gemm.problem import Weights
from torch_attnkit.kernels.grouped_gemm.sm90 import plan as grouped
from torch_attnkit.kernels.grouped_gemm.sm90.config import SHARED_SMALL, Config
from torch_attnkit.kernels.norm import plan as norm
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.kernels.topk import plan as topk

KB99 = 99 << 10
SMALL = tuple(arch for arch, limits in LIMITS.items() if limits.shared == KB99)
SMS = (20, 48, 84, 108, 170)  # multiprocessors of a laptop, a DGX Spark, an RTX 3090, an A100 and an RTX 5090
NOWHERE = Strides(0, 0, 0)


def test_three_targets_have_99_kb():
    assert SMALL == ("sm80", "sm89", "sm120")


def decodes(count: int) -> Iterator[Problem]:
    """Launches over caches of 16 bits and of E4M3, from one key to a quarter of a million."""
    rng = random.Random(0)
    for n in range(count):
        fp8 = n % 3 == 0
        dim, dim_v = rng.choice(list(FP8_KV_HEADS if fp8 else decode.HEADS))
        groups, group = rng.choice((1, 2, 8, 64, 700)), rng.randint(1, 80)
        page = rng.choice((0, 1, 16, 64) if fp8 else (0, 1, 3, 16, 256))
        window = rng.choice((-1, 0, 128, 5000))
        sizes = (1, groups * group, groups, dim, dim_v, int(2 ** rng.uniform(0, 18)), Scores(dim, window=window))
        dtype, pages = rng.choice((torch.bfloat16, torch.float16)), int(page > 0)
        yield Problem(dtype, torch.device("cpu"), *sizes, NOWHERE, NOWHERE, NOWHERE, page=page, pages=pages, fp8_kv=fp8)


@pytest.mark.parametrize("arch", SMALL)
def test_every_plan_of_a_decode_fits(arch):
    rng, whole = random.Random(1), set()
    for problem in decodes(1500):
        sms = rng.choice(SMS)
        plan = decode.plan(problem, sms, arch=arch, same=rng.random() < 0.5)
        sizes, per_sm = dict(plan.sizes), plan.blocks // sms
        config = (Fp8KvConfig if sizes.pop("fp8_kv", False) else MmaConfig)(SimpleNamespace(width=16), **sizes)
        assert plan.trace == trace_mma and config.capacity == LIMITS[arch].shared == KB99
        assert config.stages >= 2 and config.warps >= 1 and config.keys % 16 == 0, plan
        assert config.shared_bytes <= KB99, plan
        assert plan.blocks == per_sm * sms and 1 <= per_sm <= config.blocks_per_sm, plan
        assert per_sm * (config.shared_bytes + RESERVED) <= KB99 + RESERVED, plan
        assert plan.head_blocks * config.heads >= problem.group > (plan.head_blocks - 1) * config.heads
        whole.add(plan.whole)
    assert whole == {False, True}


def test_rows_take_no_head_that_is_not_tried_here():
    for name in ("sdpa_decode", "sdpa_decode_paged"):
        for row in OPS[name].kernels:
            if set(row.archs) & set(SMALL):
                sizes = {(d, v) for d in row.dims["D"] for v in row.dims.get("Dv", (d,))}
                assert sizes <= {*decode.HEADS, *FP8_KV_HEADS}, row


def test_tiles_of_the_batched_gemm_fit():
    for arch, limits in LIMITS.items():
        for tokens in range(1, 400):
            config = batched.configure(tokens, limits.shared)
            assert config.stages * config.stage_bytes + 1024 <= limits.shared and config.stages >= 3, (arch, tokens)


def test_tiles_of_the_fp4_batched_gemm_fit():
    for arch, format, tokens in itertools.product(SMALL, ("nvfp4", "mxfp4"), (1, 16, 17, 64, 65, 5000)):
        steps, sizes = ((0, 0),) * 3, (tokens, 8, 4096, 1024)
        problem = Fp4Problem(torch.device("cpu"), format, "linear", (False, False), torch.bfloat16, *sizes, *steps)
        config = batched.configure_fp4(problem, arch)
        assert config.stages * config.stage_bytes + 1024 <= LIMITS[arch].shared and config.stages >= 3
        assert config.stage_rows <= config.threads  # each has a row's scales


def experts(count: int) -> Iterator[Experts]:
    rng = random.Random(2)
    for _ in range(count):
        kind, swizzled = rng.choice(("nvfp4", "mxfp4")), rng.random() < 0.2
        block = {"nvfp4": 16, "mxfp4": 32}[kind]
        hidden, intermediate = (block * rng.randint(1, 4096 // block) for _ in range(2))
        up, down = (
            Weights(rows, k, rows * k // 2, k // 2, rows * k // block, k // block, k // block)
            for rows, k in ((2 * intermediate, hidden), (hidden, intermediate))
        )
        count_of, dtype = rng.choice((1, 8, 64, 512)), rng.choice((torch.bfloat16, torch.float16))
        yield Experts(
            torch.device("cpu"), dtype, torch.int32, int(2 ** rng.uniform(0, 13)), min(count_of, rng.randint(1, 10)),
            count_of, up, down, kind, rng.choice(("none", kind)), "silu", 1.702, None, rng.random() < 0.3,
            "128x4" if swizzled else "linear",
        )  # fmt: skip


def test_rings_of_the_experts_fit():
    """With 7 KB for barriers, work tiles and what sorts choices; of sm120, and of targets without bulk copies."""
    assert SHARED_SMALL == KB99 - (7 << 10)
    for problem, bulk in itertools.product(experts(600), (True, False)):
        plan = grouped.by_mma(problem, 170, SHARED_SMALL, bulk)
        for paired, vector in zip((True, False), plan.scale_vectors, strict=True):
            c = Config(
                problem.format, plan.row_warps, "bf16" if problem.dtype is torch.bfloat16 else "f16",
                problem.activations, plan.columns, paired, vector, plan.code_alignment, shared=SHARED_SMALL,
            )  # fmt: skip
            ring = c.stages * (c.weight_bytes + c.token_bytes + c.factor_bytes)
            assert c.stages >= 2, (problem, plan)
            assert ring + c.sum_bytes + c.result_bytes + c.line_bytes <= SHARED_SMALL, (problem, plan)


def test_where_there_are_no_clusters_none_is_asked_for():
    rng = random.Random(3)
    clustered = set()
    for arch, limits in LIMITS.items():
        for _ in range(300):
            n, rows, width = int(2 ** rng.uniform(0, 18)), rng.choice((1, 8, 4096)), rng.choice((1, 4, 8))
            of_norm = norm.configure(n, rows, width, 1 << 20, rng.choice(SMS), limits.clusters)
            of_topk = topk.configure(n, rows, width, rng.choice(SMS), limits.clusters)
            assert of_norm.threads <= 1024 and of_topk.threads <= 1024
            clustered |= {(arch, config.cluster > 1) for config in (of_norm, of_topk)}
    assert {arch for arch, some in clustered if some} == {arch for arch, limits in LIMITS.items() if limits.clusters}


def test_hoppers_plans_would_not_fit():
    """So that what is tried here is large enough to be refused."""
    most = 0
    for problem in decodes(100):
        sizes = dict(hopper.plan(problem, 132).sizes)
        if hopper.plan(problem, 132).trace == trace_mma:
            kind = Fp8KvConfig if sizes.pop("fp8_kv", False) else MmaConfig
            most = max(most, kind(SimpleNamespace(width=16), **sizes).shared_bytes)
    assert most > KB99
    assert batched.configure(400, LIMITS["sm90"].shared).stages > batched.configure(400, KB99).stages


@pytest.mark.parametrize("kv", ["dense", "packed", "cache", "paged"])
def test_every_tile_of_prefill_fits(kv):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from cutlass import BFloat16

    from torch_attnkit.kernels.prefill.sm80.config import MmaConfig as Prefill
    from torch_attnkit.kernels.prefill.sm80.tiles import MMA_TILES, MMA_TILES_FP8_KV, MmaTile, mma_tile

    most = 0
    tables = (MMA_TILES, False), (MMA_TILES_FP8_KV, True)
    for table, fp8_kv, (dim, dim_v), tiles in ((*kind, *item) for kind in tables for item in kind[0].items()):
        assert {mma_tile(table, dim, dim_v, rows) for rows in (1, 64, 65, 1 << 20)} == set(tiles)
        for tile in tiles:
            config = Prefill(dtype=BFloat16, dim=dim, dim_v=dim_v, kv=kv, fp8_kv=fp8_kv, **tile.sizes())
            most = max(most, config.shared.nbytes)
            assert config.shared.nbytes <= KB99 and config.threads <= 256, config
            assert config.shared.query.offset % 16 == config.stage_bytes % 16 == 0, config
    assert most == KB99  # D 256 takes all of it
    wide = Prefill(dtype=BFloat16, dim=128, dim_v=128, kv=kv, **MmaTile(128, 64, 3, 2).sizes())
    assert wide.shared.nbytes > KB99
