"""The top-k kernel on a simulated H200: ties, what no caller should pass, every way to spread a row, one launch."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.topk import plan
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

op = torch.ops.attnkit.indexer_topk
I32 = torch.iinfo(torch.int32)


def simulated(*args, arch="sm90", seed=0, calls=1, **kwargs):
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        out = op(*args, **kwargs)
    assert len(launches) == calls
    return out, launches[0]


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


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("entries", [520, 16384])  # a block, two blocks of a cluster
def test_ties_go_to_the_lowest_index(entries, seed):
    x = rows(entries)
    for topk in (1, 33, 500):
        assert torch.equal(simulated(x, topk=topk, seed=seed)[0], op(x, topk=topk))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_registers_do_not_hold_are_read_anew(monkeypatch, dtype):
    monkeypatch.setattr(plan, "_MOST_BLOCKS", 1)
    x = rows(35000).to(dtype)
    k_len = torch.tensor([35000, 34999, 3, 20000, 35000, 1, 35000, 33000], dtype=torch.int32)
    assert not plan.configure(35000, 8, 1, 132, True).resident
    for lengths in (None, k_len):
        assert torch.equal(simulated(x, lengths, topk=9000)[0], op(x, lengths, topk=9000))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [35000, 35001])  # of which the last part has 2232, 2233
def test_of_longer_rows_parts_are_chosen_from_first(monkeypatch, dtype, entries):
    """Ties go to the lowest index over all parts, and parts behind the length have nothing."""
    monkeypatch.setattr(plan, "_MOST_BLOCKS", 1)
    x = rows(entries).to(dtype)
    k_len = torch.tensor([entries, 34999, 3, 20000, 8192, 1, entries, 33000], dtype=torch.int32)
    assert plan.part_of(entries, 8, 600, 132) == 8192
    for lengths, topk in ((None, 600), (k_len, 600), (k_len, 7), (k_len - 40000, 5)):
        assert torch.equal(
            simulated(x, lengths, topk=topk, calls=2)[0],
            op(x, lengths if lengths is None else lengths.clamp(0), topk=topk),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_one_may_be_any_number(dtype):
    """The limit is infinity, 0 with -0 behind it, the number below 0, the least of all, and -inf."""
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    parts = ((torch.inf, 30), (most, 30), (least, 30), (0.0, 30), (-0.0, 30), (-least, 30), (-most, 30))
    x = torch.cat([torch.full((n,), v) for v, n in (*parts, (-torch.inf, 30), (torch.nan, 30))]).to(dtype)
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))][None]
    for topk in (1, 29, *range(30, 241, 30), 45, 75, 105, 165, 195):
        assert torch.equal(simulated(x, topk=topk)[0], op(x, topk=topk)), topk


@pytest.mark.parametrize("entries", [520, 16384])
def test_lengths_that_are_refused_on_the_cpu_lead_nowhere(entries):
    """Kernels cannot look before they run: lengths are cut to the row, and nothing else is read or written."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, entries, generator=gen)
    k_len = torch.tensor([-1, entries + 1, I32.max, I32.min, 7], dtype=torch.int32)
    got, _ = simulated(x, k_len, topk=64)
    assert torch.equal(got, op(x, k_len.clamp(0, entries), topk=64))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("tokens", "entries"), [(3, 700), (1, 40000), (600, 300)])
def test_random_rows_under_hostile_schedules(tokens, entries):
    """The last case has more rows than the machine works on at a time."""
    gen = torch.Generator().manual_seed(entries)
    x = torch.randn(tokens, entries, generator=gen)
    k_len = torch.randint(0, entries + 1, (tokens,), generator=gen, dtype=torch.int32)
    for seed, arch in ((1, "sm90"), (2, "sm90"), (3, "sm100")):
        assert torch.equal(simulated(x, k_len, topk=100, seed=seed, arch=arch)[0], op(x, k_len, topk=100))


def test_a_row_takes_few_instructions():
    """What bounds thousands of rows. Seen: 7,311 of PTX a row; docs/lab/topk.md counts the machine code."""
    x = torch.randn(140, 8192, generator=torch.Generator().manual_seed(0))
    _, launch = simulated(x, topk=512)
    assert launch.counters["instructions"] <= 140 * 7_600
