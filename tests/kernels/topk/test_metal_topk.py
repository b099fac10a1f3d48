"""Top-k on Metal: ties, every way to spread a row, what no caller should pass, and how often a row is read."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.topk import metal as topk
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
op = torch.ops.attnkit.indexer_topk
I32 = torch.iinfo(torch.int32)


def simulated(*args, **kwargs) -> tuple[torch.Tensor, list[metal.Report]]:
    with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
        out = op(*args, **kwargs)
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(*args, **kwargs)
    return out, list(reports)


def rows(entries: int) -> torch.Tensor:
    """Rows that tie: all equal, two values in turns, 0 and -0, few above many, the largest last, nothing, one."""
    x = torch.zeros(8, entries)
    x[1, ::2] = 1.0
    x[2, 1::2] = -0.0
    x[3, 5::97] = 3.0
    x[4, -40:] = 1.0
    x[5] = -torch.inf
    x[6] = torch.nan
    x[6, entries // 2] = -1e38
    x[7] = torch.arange(entries) % 251 - 125.0
    return x


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("entries", "topk", "launches"),
    [
        pytest.param(520, 33, 1, id="registers"),
        pytest.param(17000, 500, 2, id="parts"),
        pytest.param(17000, 9000, 1, id="anew for every pass"),
    ],
)
def test_ties_go_to_the_lowest_index(entries: int, topk: int, launches: int):
    x = rows(entries)
    k_len = torch.tensor([entries, entries - 1, 3, entries // 2, entries, 1, entries, topk], dtype=torch.int32)
    got, reports = simulated(x, k_len, topk=topk)
    assert len(reports) == launches and torch.equal(got, op(x, k_len, topk=topk))


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_differ_in_all_of_them(dtype: torch.dtype):
    """Every number there is, of which two passes must tell the one before from the one behind the limit."""
    bits = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0)).short()
    x = bits.view(dtype).view(4, -1)
    assert torch.equal(simulated(x, topk=4001)[0], op(x, topk=4001))


def test_lengths_that_lie_stay_inside():
    x = torch.arange(60.0).view(3, 20)
    got, _ = simulated(x, torch.tensor([I32.max, I32.min, -1], dtype=torch.int32), topk=4)
    assert got.tolist() == [[16, 17, 18, 19], [-1] * 4, [-1] * 4]


@pytest.mark.proof
def test_a_row_that_registers_hold_and_the_parts_of_a_longer_one_are_read_once():
    for entries, launches in ((4000, 1), (40000, 2)):
        x = torch.randn(1, entries, generator=torch.Generator().manual_seed(0))
        _, reports = simulated(x, topk=50)
        assert len(reports) == launches and reports[0].buffers["scores"] == (x.nbytes, 0)


@pytest.mark.proof
def test_a_length_leaves_out_what_lies_behind_it():
    x = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    _, (report,) = simulated(x, torch.tensor([100, 30], dtype=torch.int32), topk=50)
    assert report.buffers["scores"] == (130 * 4, 0)


def test_parts_fill_the_machine_and_leave_much_fewer_to_choose_among():
    assert [topk.part_of(n, 1, 512) for n in (16384, 16385, 65536, 1 << 20)] == [16384, 8192, 4096, 8192]
    assert [topk.part_of(n, 4096, 512) for n in (16384, 65536)] == [16384, 16384]
    assert topk.part_of(17000, 1, 9000) == 17000 and topk.part_of(65536, 1, 1024) == 8192
    for entries in (16385, 70000, 1 << 20, 1 << 29):
        for rows in (1, 100):
            for chosen in (1, 512, 2048, 5000):
                part = topk.part_of(entries, rows, chosen)
                assert part == entries or (part <= 16384 and -(-entries // part) * chosen * 8 <= entries)


@pytest.mark.proof
def test_a_list_of_the_best_of_many_parts_is_cut_into_parts_again():
    x = torch.randint(-300, 300, (1, 70000), generator=torch.Generator().manual_seed(0)).float()
    got, reports = simulated(x, topk=511)
    assert len(reports) == 2 and torch.equal(got, op(x, topk=511))
    x = x.repeat(1, 4)
    got, reports = simulated(x, torch.tensor([250001], dtype=torch.int32), topk=511)
    assert len(reports) == 3 and torch.equal(got, op(x, torch.tensor([250001], dtype=torch.int32), topk=511))


@pytest.mark.parametrize("most", [1, 4, 32])
@pytest.mark.parametrize("entries", [1, 130, 520, 16384, 16385])
def test_every_score_has_a_thread(entries: int, most: int):
    simds = topk.simdgroups(entries, most)
    assert simds <= most and simds & (simds - 1) == 0
    assert simds == most or 32 * simds * topk.KEPT >= entries
