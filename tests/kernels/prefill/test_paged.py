"""Blocks of queries over pages on Hopper: tiles, clusters and boxes by plan, and what the kernel makes of any page."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.kernels.prefill.problem import Layout, PagedProblem
from torch_attnkit.kernels.prefill.problem import Problem as Attention
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.plan import Plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, heads
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle.compare import check

H200 = 132  # multiprocessors
NOWHERE = Layout((), ())
NAME = "flash_attention_paged"


def problem(sequences: int, tokens: int, longest: int, keys: int, page: int = 16, heads: int = 8) -> PagedProblem:
    """``heads`` KV heads with four query heads each, D 128."""
    sizes = (sequences, tokens, keys, 4 * heads, heads, 128, 128, Scores(128), NOWHERE, NOWHERE, NOWHERE)
    attention = Attention(
        torch.bfloat16, torch.device("cpu"), *sizes, causal=True, packed=True, cached=True, longest=longest
    )
    return PagedProblem(attention, page, 1000, keys)


def nothing_dynamic(monkeypatch, dim: int) -> None:
    """No dynamic tiles of this head size."""
    key = BITS16, dim, dim
    monkeypatch.setitem(TILES, key, dataclasses.replace(TILES[key], paged=None))


def test_rows_decide_on_tiles(monkeypatch):
    tiles = TILES[BITS16, 128, 128]
    assert plan.of_pages(problem(64, 64, 1, 8192), H200).tile == tiles.few_rows
    nothing_to_multicast = problem(4, 4 * 4096, 4096, 8192, page=1)
    assert plan.of_pages(nothing_to_multicast, H200) == Plan(tiles.many_rows)
    nothing_dynamic(monkeypatch, 128)
    assert plan.of_pages(problem(64, 64 * 256, 512, 8192), H200) == Plan(tiles.many_rows, box=16)
    assert plan.of_pages(problem(4, 4 * 4096, 4096, 8192), H200) == Plan(tiles.row_pairs, 2, box=16)


def test_few_sequences_share_their_keys_among_ctas():
    assert plan.of_pages(problem(1, 1, 1, 8192), H200).ctas == 8
    assert plan.of_pages(problem(1, 1, 1, 64), H200).ctas == 1  # one block
    assert plan.of_pages(problem(128, 128, 1, 8192), H200).ctas == 1
    assert plan.of_pages(problem(128, 128, 1, 8192, page=1), H200).ctas == 1


@pytest.mark.parametrize("page", [1, 7, 8, 16, 24, 48, 64, 100, 128, 256, 544])
def test_boxes_divide_pages_and_tiles(page):
    for dims in heads(BITS16):
        choice = TILES[BITS16, *dims]
        for tile in (choice.few_rows, choice.many_rows, choice.row_pairs, choice.paged):
            box = plan.box_of(page, tile)
            assert box == 0 or (page % box == 0 and (tile.tile_n // (1 + tile.pair)) % box == 0 and box % 8 == 0)
            assert (box > 0) == (page % 8 == 0)


simulated = [
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.seconds(600),
    pytest.mark.sample(8),
]


def _made(page: int, len_q: tuple[int, ...], kv_len: tuple[int, ...], heads: int, kv_heads: int, dim: int = 64) -> list:
    """Pages in random order, keys and values as halves of one tensor (Np, Hkv, Ps, 2 D), as vLLM has them. Slots past
    a length hold NaN."""
    gen = torch.Generator().manual_seed(page)
    used = [-(-n // page) for n in kv_len]
    table = torch.full((len(kv_len), max(used) + 1), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(sum(used) + 1, generator=gen).int()
    both = torch.randn(len(order), kv_heads, page, 2 * dim, generator=gen).bfloat16()
    for b, (n, keys) in enumerate(zip(used, kv_len, strict=True)):
        table[b, :n] = order[sum(used[:b]) :][:n]
        if keys % page:
            both[table[b, n - 1], :, keys % page :] = torch.nan
    q = torch.randn(sum(len_q) + 1, heads, dim, generator=gen).bfloat16()
    offsets = torch.tensor([0, *len_q], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    halves = both.transpose(1, 2).split(dim, -1)  # (Np, Ps, Hkv, D) twice
    return [q, *halves, offsets, table, torch.tensor(kv_len, dtype=torch.int32), torch.randn(heads, generator=gen)]


def _agrees(args: list, **kwargs) -> None:
    """With the reference, as parity has it."""
    reference = dispatch.OPS[NAME].module("reference").reference
    got = getattr(torch.ops.attnkit, NAME)(*args, **kwargs)
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
    for name, *three in zip(("out", "lse"), got, reference(*args, **kwargs), reference(*double, **kwargs), strict=True):
        check(name, *three)


def _call_with_anything(ptx, args: list) -> None:
    """Three calls, each with more integers that no caller should pass in offsets, table and lengths."""
    wild = torch.tensor([-(2**31), -1, 0, 7, 1 << 20, 2**31 - 1], dtype=torch.int32)
    with ptx.settings(check=True, seed=1, waive=("write_after_write",)):
        for seed in range(3):
            gen = torch.Generator().manual_seed(seed)
            for at in (3, 4, 5):
                values = wild[torch.randint(len(wild), args[at].shape, generator=gen)]
                half = torch.rand(args[at].shape, generator=gen) < 0.5
                args[at] = torch.where(half, values, args[at])
            getattr(torch.ops.attnkit, NAME)(*args)


@pytest.fixture
def ptx():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    dispatch._PLANS[NAME].clear()
    with torch_attnkit.simulate("sm90"):
        yield ptx
    dispatch._PLANS[NAME].clear()


class TestSimulated:
    pytestmark = simulated

    @pytest.mark.parametrize("page", [1, 5, 16, 24, 64, 128, 256])
    def test_pages_of_any_size_where_they_lie(self, ptx, page):
        """A chunk, a token, a sequence without queries, one shorter than its block, and drafts."""
        args = _made(page, (40, 1, 0, 9, 3), (300, 131, 20, 4, 257), 8, 2)
        with ptx.settings(check=True, seed=page % 4), ptx.counting() as launches:
            _agrees(args)
            _agrees(args, window=70, sink_tokens=5)
        assert len(launches) == 2

    @pytest.mark.parametrize("dim", [32, 96, 128, 256])
    @pytest.mark.parametrize("len_q", [(40, 9), (5, 1)])
    def test_rows_of_any_width_that_threads_copy(self, ptx, len_q, dim):
        """Rows of one, two or four runs of 128 bytes, or of 64: in tiles of 128 and of 64 keys."""
        with ptx.settings(check=True, seed=dim % 3):
            _agrees(_made(3, len_q, (150, 67), 8, 2, dim))

    def test_rows_cost_few_instructions(self, ptx):
        """Whatever threads copy, a warp's 32 lanes at once: little beside the products', which boxes leave alone."""
        counts = {}
        for page in (1, 16):
            with ptx.settings(), ptx.counting() as launches:
                getattr(torch.ops.attnkit, NAME)(*_made(page, (40,), (1024,), 8, 2, 128))
            counts[page] = launches[0].counters
        rows, boxes = counts[1], counts[16]
        assert rows["cp_async"] > 0 and rows["instructions"] < 1.05 * boxes["instructions"]
        assert rows["shared_wavefronts"] == rows["shared_least_wavefronts"]  # no bank conflicts

    @pytest.mark.parametrize("seed", [1, 2])
    def test_pairs_of_tiles(self, ptx, monkeypatch, seed):
        """Both of a pair, and one whose second tile has no rows."""
        made = plan.of_pages
        monkeypatch.setattr(plan, "_PAIRED_TILES", 0)
        monkeypatch.setattr(plan, "of_pages", lambda p, sms: made(p, 1))  # too many tiles for clusters
        args = _made(16, (70, 20), (210, 140), 8, 2)
        nothing_dynamic(monkeypatch, args[0].shape[-1])
        with ptx.settings(check=True, seed=seed), ptx.counting() as launches:
            _agrees(args)
        assert launches[0].grid[0] % 2 == 0

    @pytest.mark.parametrize(("page", "ctas"), [(16, 3), (1, 2), (16, 8)])
    def test_keys_of_a_tile_shared_by_ctas(self, ptx, monkeypatch, page, ctas):
        made = plan.of_pages
        monkeypatch.setattr(plan, "of_pages", lambda p, sms: made(p, sms)._replace(ctas=ctas))
        with ptx.settings(check=True, seed=ctas):
            _agrees(_made(page, (2, 1, 4), (500, 64, 3), 8, 2), softcap=20.0)

    def test_lengths_and_offsets_change_under_one_plan(self, ptx):
        args = _made(16, (40, 1, 9), (300, 131, 64), 8, 2)
        args[1], args[2] = (t.nan_to_num() for t in args[1:3])
        with ptx.settings(check=True, seed=1):
            for offsets, lengths in (((0, 1, 2, 50), (300, 100, 60)), ((0, 0, 50, 50), (0, 131, 1))):
                args[3], args[5] = (torch.tensor(x, dtype=torch.int32) for x in (offsets, lengths))
                _agrees(args)
        assert len(dispatch._PLANS[NAME]) == 1

    @pytest.mark.parametrize("page", [1, 16])
    def test_nothing_is_read_that_is_not_there(self, ptx, page):
        """Offsets, lengths and tables that no caller should pass: the simulator refuses every access out of bounds.

        Sequences whose offsets overlap have rows that two CTAs write: that is no finding here.
        """
        _call_with_anything(ptx, _made(page, (40, 1, 9), (300, 131, 64), 8, 2))


def test_the_problem_says_all_that_a_plan_asks():
    """A shorter hint plans fewer CTAs for a tile, and nothing else changes."""
    p = problem(1, 1, 1, 8192)
    short = dataclasses.replace(p, longest_keys=64)
    assert plan.of_pages(short, H200) == plan.of_pages(p, H200)._replace(ctas=1)
