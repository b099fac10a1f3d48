"""The tiles and clusters of sdpa_multi on Hopper: what was measured to be best is chosen, and everything fits."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.kernels.prefill.problem import Layout, Problem
from torch_attnkit.kernels.prefill.sm90 import multi_plan
from torch_attnkit.kernels.prefill.sm90.clusters import at_once
from torch_attnkit.kernels.prefill.sm90.multi_plan import TILES
from torch_attnkit.kernels.scores import Scores

H200 = 132  # multiprocessors
NOWHERE = Layout((), ())
SHARED, RESERVED = 228 << 10, 1 << 10  # bytes of a multiprocessor, and of them what every block costs


def plan(dim: int, rows: int, groups: int, keys: int, sms: int) -> multi_plan.Plan:
    """Of ``groups`` KV heads with ``rows`` rows each."""
    sizes = (groups, rows, keys, 1, 1, dim, dim, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
    return multi_plan.plan(Problem(torch.bfloat16, torch.device("cpu"), *sizes, causal=True, cached=True), sms)


@pytest.mark.parametrize(("queries", "batch", "ctas"), [(16, 1, 8), (16, 4, 3), (16, 16, 1), (64, 1, 6), (64, 4, 2)])
def test_the_best_of_what_was_timed(queries, batch, ctas):
    """On an H200, 32/8 heads, D 128, 8192 keys, over the cluster sizes from 1 to 8."""
    chosen = plan(128, 4 * queries, 8 * batch, 8192, H200)
    assert chosen == (TILES[128, 128][queries > 16], ctas, H200 if (queries, batch) == (16, 16) else 0)


def test_tiles_that_fill_the_machine_are_paired():
    assert plan(128, 256, 128, 8192, H200) == (TILES[128, 128].pair, 2, 0)
    assert plan(128, 384, 128, 8192, H200) == (TILES[128, 128].many, 1, 0)  # three tiles


def test_clusters_stay_inside_a_gpc():
    """An H200 ran 32 clusters of 3 at once, but not 32 of 4, and 16 of 6, but not 16 of 7 or 8."""
    assert at_once(3, H200, 1) >= 32 > at_once(4, H200, 1)
    assert at_once(6, H200, 1) >= 16 > at_once(7, H200, 1) >= at_once(8, H200, 1)
    assert at_once(2, H200, 1) == 66


@pytest.mark.parametrize("keys", [1, 17, 700, 8192, 1 << 20])
@pytest.mark.parametrize("groups", [1, 8, 100, 5000])
def test_any_machine_gets_a_plan(keys, groups):
    for sms in (1, 78, 114, 132):
        for rows in (1, 64, 65, 128, 129, 4096):
            chosen = plan(64, rows, groups, keys, sms)
            assert 1 <= chosen.ctas <= 8
            assert chosen.tiles.pair <= (chosen.ctas == 2 and rows > 64)


def test_shared_memory_holds_the_operands_and_the_partial_results():
    for (dim, dim_v), choice in TILES.items():
        for t in choice:
            operands = 2 * (t.tile_m * dim + t.stages * t.tile_n * (dim + dim_v))
            assert t.tile_m * (dim_v + 10) * 4 <= operands, (dim, t)
            assert t.per_sm * (operands + 1024 + RESERVED) <= SHARED, (dim, t)


def test_cost_falls_with_the_machine():
    tiles = TILES[128, 128].few
    small, large = (multi_plan.cost(tiles, 1, 1, 512, 128, 256, sms) for sms in (66, 132))
    assert large < small
