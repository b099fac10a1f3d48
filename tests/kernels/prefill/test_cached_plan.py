"""The tiles and clusters of sdpa_multi on Hopper: what was measured to be best is chosen, and everything fits."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.kernels.prefill.problem import Layout, Problem
from torch_attnkit.kernels.prefill.sm90 import plan as plans
from torch_attnkit.kernels.prefill.sm90.plan import Plan, resident_clusters
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, heads
from torch_attnkit.kernels.scores import Scores

H200 = 132  # multiprocessors
NOWHERE = Layout((), ())
D128 = TILES[BITS16, 128, 128]
SHARED, RESERVED = 228 << 10, 1 << 10  # bytes of a multiprocessor, and of them what every block costs


def plan(dim: int, rows: int, groups: int, keys: int, sms: int) -> Plan:
    """Of ``groups`` KV heads with ``rows`` rows each."""
    sizes = (groups, rows, keys, 1, 1, dim, dim, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
    return plans.of_cache(Problem(torch.bfloat16, torch.device("cpu"), *sizes, causal=True, cached=True), sms)


@pytest.mark.parametrize(("queries", "batch", "ctas"), [(16, 1, 8), (16, 4, 3), (16, 16, 1), (64, 1, 6), (64, 4, 2)])
def test_the_best_of_what_was_timed(queries, batch, ctas):
    """On an H200, 32/8 heads, D 128, 8192 keys, over the cluster sizes from 1 to 8."""
    chosen = plan(128, 4 * queries, 8 * batch, 8192, H200)
    shared = H200 if (queries, batch) == (16, 16) else 0
    assert chosen == Plan(D128.few_rows if queries == 16 else D128.many_rows, ctas, shared)


def test_tiles_that_fill_the_machine_are_paired():
    assert plan(128, 256, 128, 8192, H200) == Plan(D128.row_pairs, 2)
    assert plan(128, 384, 128, 8192, H200) == Plan(D128.many_rows)  # three tiles


def test_clusters_stay_inside_a_gpc():
    """An H200 ran 32 clusters of 3 at once, but not 32 of 4, and 16 of 6, but not 16 of 7 or 8."""
    assert resident_clusters(3, H200, 1) >= 32 > resident_clusters(4, H200, 1)
    assert resident_clusters(6, H200, 1) >= 16 > resident_clusters(7, H200, 1) >= resident_clusters(8, H200, 1)
    assert resident_clusters(2, H200, 1) == 66


@pytest.mark.parametrize("keys", [1, 17, 700, 8192, 1 << 20])
@pytest.mark.parametrize("groups", [1, 8, 100, 5000])
def test_any_machine_gets_a_plan(keys, groups):
    for sms in (1, 78, 114, 132):
        for rows in (1, 64, 65, 128, 129, 4096):
            chosen = plan(64, rows, groups, keys, sms)
            assert 1 <= chosen.ctas <= 8
            assert chosen.tile.pair <= (chosen.ctas == 2 and rows > 64)


def test_shared_memory_holds_the_operands_and_the_partial_results():
    for dim, dim_v in heads(BITS16):
        choice = TILES[BITS16, dim, dim_v]
        for t in (choice.few_rows, choice.many_rows, choice.row_pairs):
            operands = 2 * (t.tile_m * dim + t.stages * t.tile_n * (dim + dim_v))
            assert t.tile_m * (dim_v + 10) * 4 <= operands, (dim, t)
            assert t.per_sm * (operands + 1024 + RESERVED) <= SHARED, (dim, t)


def test_cost_falls_with_the_machine():
    small, large = (plans.cost(D128.few_rows, 1, 1, 512, 128, 256, sms) for sms in (66, 132))
    assert large < small
