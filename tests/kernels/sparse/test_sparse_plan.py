"""How work is cut on an H200: all at the same time where it fits, and every key by one CTA."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.prefill.sm90.multi_plan import at_once
from torch_attnkit.kernels.sparse.problem import Problem
from torch_attnkit.kernels.sparse.sm90.config import Config
from torch_attnkit.kernels.sparse.sm90.plan import ALIGNED, CODED_TILES, REUSED_TILES, TILES, plan, share

SMS = 132
ONE = Problem(
    torch.bfloat16, torch.device("cpu"), tokens=1, heads=64, dim=512, requests=1, capacity=256, window=128,
    entries=8192, listed=512, has_list=True, has_length=False, has_requests=False, has_sink=True, factor=1.0,
    normalize=True,
)  # fmt: skip


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 31, 32, 33, 64, 65, 128, 133, 4096])
@pytest.mark.parametrize("listed", [0, 16, 512, 1024, 8192])
def test_shared_work_runs_at_the_same_time_or_is_worth_it(tokens, heads, listed):
    problem = dataclasses.replace(ONE, tokens=tokens, heads=heads, listed=listed)
    cut = plan(problem, SMS)
    work, parts = tokens * -(-heads // 64), cut.ctas * cut.groups
    assert cut.sizes["merge"] == (parts > 1) and cut.together == (work if parts > 1 else min(work, SMS))
    assert cut.groups == 1 or work * cut.groups <= at_once(cut.ctas, SMS, 1)
    each = share(problem.keys, parts)
    assert each % ALIGNED == 0 and each * parts >= problem.keys > each * (parts - 1) - ALIGNED * parts


def test_one_token_has_many_multiprocessors_and_many_tokens_one_each():
    assert plan(ONE, SMS).ctas == 8
    long = plan(dataclasses.replace(ONE, listed=8192), SMS)
    assert long.ctas * long.groups > 32 and long.floats == long.groups * 64 * 514
    assert plan(dataclasses.replace(ONE, tokens=4096), SMS).together == SMS


def test_keys_that_many_tokens_share_are_not_asked_for_ahead():
    many = dataclasses.replace(ONE, tokens=4096)
    assert plan(many, SMS).sizes["keys"] == 64 and not plan(many, SMS).sizes["prefetch"]
    for cold in (dict(tokens=128, requests=128), dict(entries=1 << 20), dict(tokens=70, listed=64)):
        sizes = plan(dataclasses.replace(many, **cold), SMS).sizes
        assert sizes["keys"] == 48 and sizes["prefetch"]


@pytest.mark.parametrize("dim", TILES)
@pytest.mark.parametrize(("merge", "tiles"), [(False, TILES), (True, TILES), (False, REUSED_TILES)])
def test_shared_memory_fits(dim, merge, tiles):
    config = Config(type("Bits", (), {"width": 16}), dim, *tiles[dim], merge=merge, prefetch=False)
    assert config.shared_bytes <= 227 << 10 and config.shared.partial.end <= config.shared.ring.end
    assert config.keys % 16 == 0 and config.keys <= 64


@pytest.mark.parametrize("dim", CODED_TILES)
@pytest.mark.parametrize("format", kv_cache.FORMATS[1:])
def test_shared_memory_fits_with_scales_and_a_tile_that_is_decoded(dim, format):
    config = Config(
        type("Bits", (), {"width": 16}), dim, *CODED_TILES[dim], merge=True, prefetch=False, format=format, rope_dim=64
    )
    assert config.shared_bytes <= 227 << 10 and config.shared.partial.end <= config.shared.ring.end
    assert config.shared.barriers.offset % 8 == 0 and config.shared.scales.offset % 16 == 0
    # One on its way, one that is decoded or read, and one whose output waits for the scores of the next.
    assert config.stages >= 3
    # Of half a tile's columns a lane has four chunks at a time, of which a row has dim // 16.
    assert config.keys // 4 * (dim // 16) % (4 * 32) == 0


def test_rows_are_decoded_without_a_prefetch_that_they_may_start_too_oddly_for():
    many = plan(dataclasses.replace(ONE, tokens=128, requests=128), SMS)
    coded = plan(dataclasses.replace(ONE, tokens=128, requests=128, format="fp8", rope_dim=64, align=8), SMS)
    assert many.sizes["prefetch"] and not coded.sizes["prefetch"] and coded.sizes["align"] == 8
