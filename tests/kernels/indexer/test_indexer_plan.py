"""Which of the indexer's two kernels takes a problem, and how a launch is cut."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.kernels.indexer.problem import Problem
from torch_attnkit.kernels.indexer.sm90 import plan
from torch_attnkit.kernels.prefill.problem import Layout

SMS = 132


def problem(tokens=1, requests=1, entries=65536, heads=64, **more):
    """E4M3, pages of 64."""
    q = Layout((tokens, heads, 128), (heads * 128, 128, 1))
    given = dict(
        device=torch.device("cpu"), format="fp8", dtype=torch.float8_e4m3fn, weights=torch.bfloat16, tokens=tokens,
        requests=requests, entries=entries, heads=heads, dim=128, q=q, q_scale_steps=(), k_steps=(8192, 128), page=64,
        ids=False, paged=True, q_scale=False,
    )  # fmt: skip
    return Problem(**(given | more))


@pytest.mark.parametrize(
    ("streams", "more"),
    [
        (True, dict()),
        (True, dict(tokens=128, requests=32)),  # four of a request
        (False, dict(tokens=160, requests=32)),
        (True, dict(tokens=2, heads=128)),
        (False, dict(tokens=3, heads=128)),  # accumulators of 384 columns
        (True, dict(page=192)),
        (False, dict(page=32)),  # a box of keys would be of two pages
        (True, dict(page=100, paged=False)),
        (False, dict(ids=True)),
        (True, dict(format="mxfp4", dtype=torch.uint8, k_steps=(4096, 64))),
        (True, dict(format="mxfp4", dtype=torch.uint8, tokens=96, requests=32)),
        (False, dict(format="mxfp4", dtype=torch.uint8, tokens=128, requests=32)),
        (True, dict(format="none", dtype=torch.bfloat16)),
        (False, dict(k_steps=(8448, 132))),  # TMA takes multiples of 16 bytes
        (True, dict(k_steps=(8448, 128))),
        (False, dict(k_steps=(0, 128))),
        (False, dict(tokens=1025, requests=1025)),
        (False, dict(tokens=4, requests=8)),  # no token of a request
    ],
)
def test_keys_stream_where_tokens_are_few_and_tma_reads_them(streams, more):
    assert plan.streams(problem(**more)) is streams


@pytest.mark.parametrize(("tokens", "requests", "entries"), [(4096, 1, 32768), (1024, 1, 131072), (512, 64, 8192)])
def test_blocks_fill_the_machine_evenly(tokens, requests, entries):
    """At most 7 % of the time goes into starts and into blocks that run alone at the end."""
    p = problem(tokens, requests, entries)
    keys = 3 * 128
    each = plan.tokens_of_block(p, keys, SMS)
    blocks = -(-entries // keys) * requests * -(-tokens // requests // each)
    assert blocks / SMS / -(-blocks // SMS) > 0.93


@pytest.mark.parametrize(
    ("tokens", "heads", "row", "blocks"),
    [(1, 64, 128, 2), (4, 64, 128, 1), (1, 64, 256, 1), (2, 128, 256, 1), (1, 1, 64, 2), (2, 32, 128, 2)],
)
def test_keys_on_their_way_fit_beside_the_queries(tokens, heads, row, blocks):
    """Two blocks have as much on its way together as one would have, or nearly."""
    stages, found = plan.stream_cut(tokens, heads, row)
    tables = 4 * (2 * plan.MOST_REQUESTS + 64)
    taken = stages * plan.TILE * (row + 4) + 2 * tokens * plan.columns(heads) * (row + 8) + tables
    assert found == blocks and stages in (2, 4, 8) and found * taken < 220 << 10


def test_a_warpgroup_has_no_more_sums_than_registers():
    """A product of 64 keys has half a register a column; keys, weights and addresses take 100 at most."""
    for heads, itemsize in ((64, 1), (64, 2), (128, 1), (128, 2), (1, 1)):
        consumers, tiles, tokens_per_mma = plan.shape(heads, itemsize, q_scale=False)
        config = plan.Config(
            "", "", "", heads, 128, 2, False, False, False, False, 16, consumers, tiles, tokens_per_mma
        )
        own, others = config.registers
        assert tiles * tokens_per_mma * config.columns // 2 + (heads > 64 or itemsize == 2) * 64 <= own - 40
        assert consumers * own + others <= (64 << 10) // config.threads // 8 * 8 * (consumers + 1)


@pytest.mark.parametrize(
    ("tokens", "requests", "entries", "capacity"),
    [
        (1, 1, 8192, 128),  # a tile for each of 64 blocks
        (1, 1, 262144, 2048),
        (1, 1, 1 << 20, 8192),
        (1, 1, 1 << 22, 0),  # 32,768 scores of a block beside 128 KB of keys
        (2, 1, 262144, 2048),
        (2, 2, 65536, 0),
    ],
)
def test_scores_stay_in_shared_memory_where_there_is_room(tokens, requests, entries, capacity):
    given = problem(tokens, requests, entries)
    each = plan.tokens_of_request(given)
    stages = plan.stream_stages(each, given.heads, given.dim)
    stream = plan.StreamConfig("f8e4m3", "f8e4m3", "bf16", given.heads, given.dim, each, stages, 1, True, False, True)
    blocks = min(SMS, -(-entries // plan.TILE))
    found = plan.selects(given, stream, blocks)
    assert (found.capacity if found else 0) == capacity
    if found:
        assert found.shared <= 227 << 10 and blocks * capacity >= entries
