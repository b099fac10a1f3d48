"""Scores and selection in one kernel, on a simulated H200: ties, lengths, pages, launches that follow each other."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

op = torch.ops.attnkit.indexer_select
I32 = torch.iinfo(torch.int32)


def simulated(args, seed=0, **kwargs):
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        got = op(*args, **kwargs)
    assert len(launches) == 1
    return got


def inputs(T, S, H=4, by=2, seed=0, k_len=None):
    """Small integers in E4M3, whose scores are exact: the smaller ``by``, the more of them tie."""
    gen = torch.Generator().manual_seed(seed)
    integers = lambda most, *shape: torch.randint(-most, most + 1, shape, generator=gen).float()
    q, k = (integers(by, *shape).to(torch.float8_e4m3fn) for shape in ((T, H, 128), (1, S, 128)))
    lengths = torch.tensor((k_len or [S] * T), dtype=torch.int32)
    return q, k, integers(30 * by, T, H), lengths, None, None, None, 1 + integers(1, 1, S, 1).abs()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("T", "S", "k_len", "topks", "sms"),
    [
        (1, 700, None, (1, 128, 705), 132),
        (1, 1403, [1301], (1, 100, 1300), 4),  # 11 tiles of 4 blocks
        (4, 1500, [1500, 0, 129, 700], (1, 128, 1500), 132),
    ],
)
def test_it_is_selection_after_scores(T, S, k_len, topks, sms, monkeypatch):
    monkeypatch.setattr("torch_attnkit.cuda.driver.sm_count", lambda device: sms)
    args = inputs(T, S, k_len=k_len)
    for seed, topk in enumerate(topks):
        want = op(*args, format="fp8", topk=topk)
        assert torch.equal(simulated(args, seed, format="fp8", topk=topk), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", [0, 1])
def test_ties_over_all_blocks_go_to_the_first(by):
    """All scores are 0, or one of few numbers: what equals the limit lies in all of the 8 blocks."""
    args = inputs(2, 1024, H=1, by=by, k_len=[1024, 1001])
    for topk in (1, 500, 1024):
        assert torch.equal(simulated(args, topk, format="fp8", topk=topk), op(*args, format="fp8", topk=topk))


def test_nan_is_never_chosen_and_what_is_missing_is_minus_1():
    args = inputs(1, 600)
    args[7][0, 100:520] = torch.nan
    got = simulated(args, format="fp8", topk=300)
    assert got[0].tolist() == [*range(100), *range(520, 600)] + [-1] * 120
    assert simulated(inputs(1, 600, k_len=[0]), format="fp8", topk=3).tolist() == [[-1] * 3]


def test_lengths_and_pages_that_are_refused_on_the_cpu_lead_nowhere():
    q, k, weights, _, _, _, _, scale = inputs(4, 640)
    lengths = torch.tensor([I32.max, I32.min, -1, 641], dtype=torch.int32)
    table = torch.arange(10, dtype=torch.int32).flip(0)[None]
    pages, scales = (x[0].unflatten(0, (10, 64))[table[0].long()].contiguous() for x in (k.float(), scale))
    table[0, 3], table[0, 7] = -1, I32.max
    got = simulated((q, pages.to(k.dtype), weights, lengths, None, table, None, scales), format="fp8", topk=90)
    zeros = k.float()  # a page that is not there holds zeros
    zeros[0, 192:256], zeros[0, 448:512] = 0, 0
    args = q, zeros.to(k.dtype), weights, lengths.clamp(0, 640), None, None, None, scale
    assert torch.equal(got, op(*args, format="fp8", topk=90))


def test_keys_at_an_address_that_tma_does_not_take_go_another_way():
    args = list(inputs(1, 300))
    args[1] = torch.cat([args[1].view(torch.uint8).view(-1)[:8], args[1].view(torch.uint8).view(-1)])[8:]
    args[1] = args[1].view(torch.float8_e4m3fn).view(1, 300, 128)
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        got = op(*args, format="fp8", topk=20)
    assert len(launches) == 2
    assert torch.equal(got, op(*args, format="fp8", topk=20))
