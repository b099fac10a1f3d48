"""How rows of logits are spread over lanes, and that what is sorted without looking is sorted."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_attnkit.kernels.routing.plan import LANES, configure, sorting_network

SMS = 132


@pytest.mark.parametrize("count", range(1, 15))
def test_networks_leave_the_largest_in_front(count):
    """A network that sorts all sequences of zeros and ones sorts everything (Knuth, volume 3, 5.3.4, theorem Z)."""
    rows = torch.tensor(list(itertools.product((0, 1), repeat=count)), dtype=torch.int8)  # (2^count, count)
    want = rows.sort(-1, descending=True).values
    for depth in range(1, count + 1):
        got = rows.clone()
        for a, b in sorting_network(count, depth):
            assert a < b < count
            got[:, a], got[:, b] = got[:, a].maximum(got[:, b]), got[:, a].minimum(got[:, b])
        assert torch.equal(got[:, :depth], want[:, :depth])


@pytest.mark.parametrize("count", [16, 20, 24, 31, 32])
def test_long_networks_sort_random_keys_with_ties(count):
    gen = torch.Generator().manual_seed(count)
    rows = torch.randint(0, 12, (20000, count), generator=gen)
    for depth in (1, 6, count):
        got = rows.clone()
        for a, b in sorting_network(count, depth):
            got[:, a], got[:, b] = got[:, a].maximum(got[:, b]), got[:, a].minimum(got[:, b])
        assert torch.equal(got[:, :depth], rows.sort(-1, descending=True).values[:, :depth])


def test_pairs_whose_outcome_nobody_looks_at_are_left_out():
    # Batcher's network of 8 has 19 pairs.
    assert [len(sorting_network(8, depth)) for depth in (1, 6, 8)] == [7, 19, 19]


def test_every_expert_has_one_lane_and_every_load_is_whole():
    for experts, topk, rows in itertools.product(
        (1, 7, 31, 33, 128, 144, 256, 384, 512, 1000, 1024), (1, 6, 16), (1, 9000)
    ):
        c = configure(experts, min(topk, experts), rows, 8, SMS)
        assert c.per_lane % c.width == 0 and experts % c.width == 0
        assert c.per_lane * LANES >= experts and c.even == (c.per_lane * LANES == experts)


def test_rows_that_are_too_long_and_rounds_that_are_too_many_are_streamed():
    assert configure(1024, 16, 1, 8, SMS).per_lane == 32
    assert configure(1025, 6, 1, 8, SMS).per_lane == configure(256, 17, 1, 8, SMS).per_lane == 0


def test_models_in_use_have_the_fewest_keys_in_a_lane():
    spreads = {(c.experts): (c.width, c.per_lane) for c in (configure(e, 6, 1, 8, SMS) for e in (128, 256, 384, 512))}
    assert spreads == {128: (4, 4), 256: (8, 8), 384: (4, 12), 512: (8, 16)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_number_of_16_bits_needs_the_bits_that_hold_the_expert(dtype):
    """``kernel._PLACES``: 13 bits, of which 1024 experts take 10."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    bits = every[~every.isnan()].view(torch.int32)
    assert bool(((bits & 0x1FFF) == 0).all())
