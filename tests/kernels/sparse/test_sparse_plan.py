"""How work is cut on an H200 and on a B200: all at the same time where it fits, and every key by one CTA."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_attnkit.cuda.sm90.clusters import resident_clusters
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.cache.problem import Row as kv_cache_row
from torch_attnkit.kernels.sparse.problem import Problem
from torch_attnkit.kernels.sparse.sm90.config import Config
from torch_attnkit.kernels.sparse.sm90.plan import (
    ALIGNED,
    BULK_TILES,
    DEQUANT_SINGLE_PASS_TILES,
    DEQUANT_TILES,
    REUSED_TILES,
    SINGLE_PASS_DIM,
    SINGLE_PASS_TILES,
    TILES,
    bulk_copied,
    plan,
    share,
)
from torch_attnkit.kernels.sparse.sm100 import config as blackwell
from torch_attnkit.kernels.sparse.sm100.plan import HEADS, heads_of
from torch_attnkit.kernels.sparse.sm100.plan import plan as blackwell_plan

SMS, BLACKWELL_SMS = 132, 148
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
    assert cut.sizes["split_kv"] == (parts > 1) and cut.concurrent == (work if parts > 1 else min(work, SMS))
    assert cut.groups == 1 or work * cut.groups <= resident_clusters(cut.ctas, SMS, 1)
    each = share(problem.keys, parts)
    assert each % ALIGNED == 0 and each * parts >= problem.keys > each * (parts - 1) - ALIGNED * parts


def test_one_token_has_many_multiprocessors_and_many_tokens_one_each():
    assert plan(ONE, SMS).ctas == 8
    long = plan(dataclasses.replace(ONE, listed=8192), SMS)
    assert long.ctas * long.groups > 32 and long.floats == long.groups * 64 * 514
    assert plan(dataclasses.replace(ONE, tokens=4096), SMS).concurrent == SMS


def test_keys_that_many_tokens_share_are_not_asked_for_ahead():
    many = dataclasses.replace(ONE, tokens=4096)
    assert plan(many, SMS).sizes["keys"] == 64 and not plan(many, SMS).sizes["prefetch"]
    for cold in (dict(tokens=128, requests=128), dict(entries=1 << 20), dict(tokens=70, listed=64)):
        sizes = plan(dataclasses.replace(many, **cold), SMS).sizes
        assert sizes["keys"] == 48 and sizes["prefetch"]


@pytest.mark.parametrize("dim", TILES)
@pytest.mark.parametrize(("merge", "tiles"), [(False, TILES), (True, TILES), (False, REUSED_TILES)])
def test_shared_memory_fits(dim, merge, tiles):
    config = Config(type("Bits", (), {"width": 16}), dim, *tiles[dim], split_kv=merge, prefetch=False)
    assert config.shared_bytes <= 227 << 10 and config.shared.receive.end <= config.shared.query.end
    assert config.shared.partials.end <= config.shared.probabilities.offset or not config.shared.partials.nbytes
    assert config.keys % 16 == 0 and config.keys <= 64


@pytest.mark.parametrize("dim", DEQUANT_TILES)
@pytest.mark.parametrize("format", kv_cache.FORMATS[1:])
@pytest.mark.parametrize("align", [4, 8, 16])
@pytest.mark.parametrize("rope", [0, 64, 128])
def test_shared_memory_fits_with_scales_and_a_tile_that_is_decoded(dim, format, align, rope):
    if dim <= rope:
        return
    bits, tiles = type("Bits", (), {"width": 16}), DEQUANT_TILES[dim]
    whole = bulk_copied(kv_cache_row(format, dim, rope), align)
    tiles = BULK_TILES[dim] if whole else tiles
    config = Config(bits, dim, *tiles, split_kv=True, prefetch=False, format=format, rope_dim=rope, align=align)
    assert config.bulk == whole and (not whole or (dim == 512 and config.row.layout.scales % 16 == 0))
    assert not whole or align == 16 or config.row.layout.size % 16 == 8
    assert config.shared_bytes <= 227 << 10 and config.shared.receive.end <= config.shared.query.end
    assert config.shared.partials.end <= config.shared.probabilities.offset or not config.shared.partials.nbytes
    assert config.shared.barriers.offset % 8 == 0 and config.shared.scales.offset % 16 == 0
    # One on its way, one that is decoded or read, and one whose output waits for the scores of the next.
    assert config.stages >= 3
    # Of half a tile's columns a lane has four chunks at a time, of which a row has dim // 16.
    assert config.keys // 4 * (dim // 16) % (4 * 32) == 0


@pytest.mark.parametrize(
    ("format", "tiles"),
    [
        (name, t)
        for name in kv_cache.FORMATS
        for t in (SINGLE_PASS_TILES if name == "none" else DEQUANT_SINGLE_PASS_TILES)
    ],
)
def test_shared_memory_fits_where_keys_are_there_at_once(format, tiles):
    keys, stages = tiles
    config = Config(
        type("Bits", (), {"width": 16}), SINGLE_PASS_DIM, keys, stages, split_kv=True, prefetch=False, format=format,
        rope_dim=0 if format == "none" else 64, single_pass=True,
    )  # fmt: skip
    shared = config.shared
    assert config.shared_bytes <= 227 << 10 and shared.receive.end <= shared.query.end
    assert shared.partials.end <= shared.masks.offset
    # Either warpgroup's part of the scores is where its columns of Q were; a mask has a bit for each row of a warp.
    assert keys * 64 * 4 <= shared.query.nbytes // 2 and keys // 4 < 32
    # Of half a row a lane has a chunk, and of a warp's rows it decodes four at a time.
    assert keys // 4 % 4 == 0 or format == "none"


@pytest.mark.parametrize("format", ["none", "fp8"])
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 33, 128])
@pytest.mark.parametrize("listed", [0, 100, 512, 1024, 8192])
def test_a_tile_that_is_there_at_once_has_all_keys_of_a_cta(format, tokens, listed):
    """A list may have more places than there are entries."""
    problem = dataclasses.replace(
        ONE, tokens=tokens, listed=listed, entries=300, format=format, rope_dim=64 * (format != "none")
    )
    cut = plan(problem, SMS)
    keys, stages, single_pass = (cut.sizes[name] for name in ("keys", "stages", "single_pass"))
    assert not single_pass or (cut.ctas > 1 and keys * stages * cut.ctas * cut.groups >= 128 + listed)


def test_few_keys_of_a_cta_are_there_at_once():
    sizes = plan(ONE, SMS).sizes
    assert (
        sizes["single_pass"]
        and sizes["keys"] == 80
        and not plan(dataclasses.replace(ONE, dim=256), SMS).sizes["single_pass"]
    )


def test_rows_are_decoded_without_a_prefetch_that_they_may_start_too_oddly_for():
    many = plan(dataclasses.replace(ONE, tokens=128, requests=128), SMS)
    coded = plan(dataclasses.replace(ONE, tokens=128, requests=128, format="fp8", rope_dim=64, align=8), SMS)
    assert many.sizes["prefetch"] and not coded.sizes["prefetch"] and coded.sizes["align"] == 8


@pytest.mark.parametrize("heads", [1, 17, 64, 65, 130])
@pytest.mark.parametrize("tokens", [1, 37, 74, 75, 4096])
@pytest.mark.parametrize("listed", [0, 512, 8192])
def test_a_b200_has_room_for_all_that_share_a_token(tokens, heads, listed):
    problem = dataclasses.replace(ONE, tokens=tokens, heads=heads, listed=listed)
    cut, (each, sides) = blackwell_plan(problem, BLACKWELL_SMS), heads_of(heads)
    assert heads <= cut.head_blocks * each * sides < heads + each * sides and cut.ctas * sides <= blackwell.MOST_CTAS
    assert cut.concurrent == tokens * cut.head_blocks and cut.sizes["split_kv"] == (cut.ctas * cut.groups > 1)
    assert cut.groups == 1 or cut.concurrent * cut.groups * cut.ctas * sides <= BLACKWELL_SMS
    parts = cut.ctas * cut.groups
    keys = share(problem.keys, parts)
    assert keys % ALIGNED == 0 and keys * parts >= problem.keys
    assert (cut.floats > 0) == (cut.counters > 0) == (cut.groups > 1)
    assert cut.floats == (cut.groups > 1) * cut.concurrent * cut.groups * sides * each * (512 + 2)


def test_one_token_has_many_multiprocessors_of_a_b200_and_many_tokens_one_each():
    wide = dataclasses.replace(ONE, heads=128, listed=1024)
    few, many = (
        blackwell_plan(wide, BLACKWELL_SMS),
        blackwell_plan(dataclasses.replace(wide, tokens=512), BLACKWELL_SMS),
    )
    assert few.ctas == 4 and few.groups > 1 and many.ctas == many.groups == 1 and not many.sizes["split_kv"]
    assert blackwell_plan(wide, 1).ctas == blackwell_plan(wide, 1).groups == 1


@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize(("heads", "sides"), [(16, 1), (32, 1), (64, 1), (64, 2)])
@pytest.mark.parametrize("format", kv_cache.FORMATS)
def test_shared_and_tensor_memory_of_a_b200_fit(dim, heads, sides, format):
    config = blackwell.Config(
        type("Bits", (), {"width": 16}),
        dim,
        heads,
        sides,
        split_kv=True,
        format=format,
        rope_dim=0 if format == "none" else 64,
    )
    assert config.scales.end + 4096 <= 227 << 10 and config.mma.tensor_memory.columns <= 512
    # A tile at least, and a mask for every tile that the ring may have a part of.
    assert config.mma.stages >= config.mma.parts and config.masks * config.mma.parts >= config.mma.stages
    assert config.mma.shared.results.end <= config.mma.shared.nbytes and config.scales.offset % 16 == 0
    assert config.own_keys * sides * blackwell.LOADERS == blackwell.KEYS
