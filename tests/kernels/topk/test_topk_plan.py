"""How rows of scores are spread over blocks and threads."""

from __future__ import annotations

import itertools

import pytest

from torch_attnkit.kernels.topk.plan import LANES, PER_THREAD, configure, part_of

SMS = 132
SIZES = (1, 31, 520, 2048, 8192, 20008, 32768, 65536, 262144, 300000, 1 << 20)


@pytest.mark.parametrize("width", [1, 4, 8])
def test_every_score_has_a_thread_and_a_bit(width):
    for entries, rows in itertools.product(SIZES, (1, 32, 64, 4096)):
        c = configure(entries, rows, width, SMS, True)
        assert c.threads % LANES == 0 and c.threads <= 1024 and 2048 % c.threads == 0
        assert c.width * c.vectors <= PER_THREAD and LANES % c.width == 0
        assert c.resident == (c.cluster * c.warps * c.tile >= entries)
        assert c.warps >= c.cluster  # a warp sends to each block


def test_rows_up_to_262144_are_read_once():
    assert [s for s in SIZES if not configure(s, 1, 4, SMS, True).resident] == [300000, 1 << 20]


def test_longer_rows_are_parts_that_a_block_holds():
    for entries, rows, topk in itertools.product(
        (262144, 300000, 1 << 20, 1 << 24), (1, 8, 500), (1, 512, 5000, 20000)
    ):
        part = part_of(entries, rows, topk, SMS)
        assert part == 0 or (entries > 262144 and configure(part, rows, 4, SMS, True).resident and part % 8 == 0)
        assert part == 0 or configure(-(-entries // part) * topk, rows, 4, SMS, True).resident
    assert part_of(1 << 20, 1, 512, SMS) == 8192 and part_of(1 << 20, 8, 512, SMS) == 32768
    assert part_of(262144, 1, 512, SMS) == part_of(1 << 20, 1, 20000, SMS) == 0


def test_few_long_rows_fill_the_machine_and_many_rows_have_small_blocks():
    spread = lambda entries, rows: (lambda c: (c.cluster, c.threads))(configure(entries, rows, 4, SMS, True))
    assert spread(65536, 1) == (8, 256) and spread(65536, 32) == (4, 512)
    assert spread(8192, 64) == (1, 256) and spread(8192, 4096) == (1, 256)
