"""The dynamic persistent scheduler over pages on Hopper: whose calls, any lengths and heads, same bits."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.core import Target, dispatch
from torch_attnkit.cuda import compile, workspace
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, heads
from torch_attnkit.parity.case import Case, arguments, bound

from .test_paged import (  # noqa: F401
    H200,
    NAME,
    _agrees,
    _call_with_anything,
    _made,
    nothing_dynamic,
    problem,
    ptx,
    simulated,
)

LENGTHS = {
    # Queries and keys: prompts, tokens, a sequence without queries, one shorter than its block, drafts.
    "mixed": ((40, 1, 0, 70, 3), (300, 131, 20, 4, 257)),
    "tokens-and-a-prompt": ((1, 1, 150, 1), (500, 1, 150, 77)),
    "short": ((20, 33, 7, 18, 25, 40, 9, 30), (20, 33, 7, 18, 25, 40, 9, 30)),  # tiles of a block are dynamic ahead
}


def test_whose_calls(monkeypatch):
    dynamic = plan.Plan(TILES[BITS16, 128, 128].paged, dynamic=H200, box=16)
    assert plan.of_pages(problem(64, 64 * 256, 512, 8192), H200) == dynamic
    assert plan.of_pages(problem(4, 4 * 4096, 4096, 8192), H200) == dynamic
    for others in (
        problem(64, 64, 1, 8192),  # few rows of a sequence
        problem(1, 64, 64, 8192),  # CTAs of a cluster share keys
        problem(64, 64 * 256, 512, 8192, page=4),  # threads copy rows
    ):
        assert plan.of_pages(others, H200).dynamic == 0
    nothing_dynamic(monkeypatch, 128)
    assert plan.of_pages(problem(64, 64 * 256, 512, 8192), H200).dynamic == 0


@pytest.mark.parametrize("dim", heads(BITS16), ids=lambda dims: f"D{dims[0]}")
def test_paritys_many_tiles_are_dynamic(dim, monkeypatch):
    plans, of_pages, op = [], plan.of_pages, dispatch.OPS[NAME]
    monkeypatch.setattr(plan, "of_pages", lambda *given: plans.append(of_pages(*given)) or plans[-1])
    index = next(i for i, row in enumerate(op.kernels) if "sm90" in row.archs and row.dims["D"] == dim[:1])
    case = Case(NAME, index, "sm90", "bf16", (("D", dim[0]), ("Dv", dim[1])), (), "many")
    with compile.recording():
        op.build(op.kernels[index], bound(op, *arguments(case)), Target("sm90"))
    assert [p.dynamic for p in plans] == [H200]


@pytest.mark.parametrize(("group", "fits"), [(1, True), (3, True), (5, True), (7, True), (12, True), (48, False)])
def test_heads_fill_a_tile(group, fits):
    assert plan.fills(TILES[BITS16, 128, 128].paged, group) == fits


@pytest.fixture(params=[2])
def ctas(request, monkeypatch, ptx):  # noqa: F811
    """Plans as on a GPU with few multiprocessors, on which the tiles of a small batch are many."""
    made = plan.of_pages
    monkeypatch.setattr(plan, "_MOST_CTAS", 1)
    monkeypatch.setattr(plan, "of_pages", lambda p, sms: made(p, request.param))
    return request.param


class TestSimulated:
    pytestmark = simulated

    @pytest.mark.sample(21)
    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
    def test_any_lengths(self, ptx, ctas, lengths, dim):  # noqa: F811
        args = _made(16, *LENGTHS[lengths], 8, 2, dim)
        with ptx.settings(check=True, seed=dim), ptx.counting() as launches:
            _agrees(args)
            _agrees(args, window=70, sink_tokens=5)
            _agrees(args, causal=False, softcap=3.0)
        assert [launch.grid for launch in launches] == [(ctas, 1, 1)] * 3
        assert all("Dynamic" in launch.kernel for launch in launches)

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("ctas", [1, 3, 7], indirect=True)
    @pytest.mark.parametrize("page", [8, 64, 256])
    def test_pages(self, ptx, ctas, page):  # noqa: F811
        with ptx.settings(check=True, seed=page % 4):
            _agrees(_made(page, *LENGTHS["mixed"], 8, 2))

    @pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1), (14, 2), (12, 1)])
    def test_heads_that_do_not_divide_a_tile(self, ptx, ctas, heads):  # noqa: F811
        with ptx.settings(check=True, seed=heads[0]):
            _agrees(_made(16, (70, 1, 90), (100, 64, 90), *heads, 128))

    @pytest.mark.parametrize("ctas", [1, 2, 5], indirect=True)
    def test_the_same_bits_whoever_takes_what(self, ptx, ctas):  # noqa: F811
        args = _made(16, *LENGTHS["mixed"], 8, 2)
        first = None
        for seed in range(3):
            with ptx.settings(check=True, seed=seed):
                got = torch.cat([t.flatten() for t in getattr(torch.ops.attnkit, NAME)(*args)])
            first = got if first is None else first
            assert torch.equal(got.nan_to_num(), first.nan_to_num())

    def test_the_counter_is_left_at_zero(self, ptx, ctas):  # noqa: F811
        """Batches one after another share it, and some have fewer tiles than there are CTAs."""
        args = _made(16, *LENGTHS["mixed"], 8, 2)
        for offsets in ((0, 40, 41, 41, 111, 114), (0, 0, 0, 0, 0, 1), (0, 100, 100, 100, 100, 114)):
            args[3] = torch.tensor(offsets, dtype=torch.int32)
            args[1], args[2] = (t.nan_to_num() for t in args[1:3])
            with ptx.settings(check=True, seed=1):
                _agrees(args)
        held = [counters for device in workspace._devices.values() for _, counters in device.streams.values()]
        assert held and not any(counters.any() for counters in held)

    def test_nothing_is_read_that_is_not_there(self, ptx, ctas):  # noqa: F811
        """As in ``test_paged.py``."""
        _call_with_anything(ptx, _made(16, (40, 1, 9), (300, 131, 64), 8, 2))
        assert len(dispatch._PLANS[NAME]) == 1
