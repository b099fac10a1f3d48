"""Blocks of queries over pages on Blackwell, in the PTX simulator: keys that TMA brings in boxes or gathers row by row,
under checks and hostile schedules."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.kernels.prefill.problem import Layout
from torch_attnkit.kernels.prefill.sm100 import plan
from torch_attnkit.oracle.compare import check

NAME = "flash_attention_paged"


@pytest.mark.parametrize("tiles", [*plan.TILES.values(), *plan.FP8_KV_TILES.values()])
def test_boxes_divide_pages_and_blocks(tiles):
    for page in (8, 16, 24, 48, 64, 104, 128, 256, 544):
        box = plan.box_of(page, tiles)
        assert page % box == 0 and tiles.tile_n % box == 0 and box % plan.LEAST_BOX == 0
    assert all(plan.box_of(page, tiles) == 0 for page in (1, 2, 4, 5, 12, 100, 129))


LAYOUTS = {
    "dense": ((5, 4, 3, 64), (768, 192, 64, 1), (60, 64)),
    "vLLM's, heads first": ((5, 4, 3, 64), (1536, 128, 512, 1), (60, 128)),
    "layers between pages": ((5, 1, 3, 64), (7680, 8, 64, 1), (4 * 120 + 3, 64)),
    "padded pages": ((5, 4, 3, 64), (776, 192, 64, 1), (4 * 97 + 3 * 24 + 2 * 8 + 1, 8)),
    "one row": ((1, 1, 1, 64), (8, 8, 8, 1), (1, 64)),
}


@pytest.mark.parametrize(("shape", "strides", "want"), LAYOUTS.values(), ids=LAYOUTS)
def test_pages_as_rows_at_one_distance(shape, strides, want):
    """Every row of the pages is one of them, and the last of them is the last row of the pages."""
    assert plan.rows_of(Layout(shape, strides)) == want
    rows, step = want
    offsets = {
        sum(i * s for i, s in zip(at, strides, strict=False)) for at in itertools.product(*map(range, shape[:3]))
    }
    assert all(offset % step == 0 for offset in offsets) and max(offsets) == (rows - 1) * step


def test_more_rows_than_numbers():
    assert plan.rows_of(Layout((2**28, 1, 8, 64), (512, 8, 64, 1))) is None
    assert plan.rows_of(Layout((2**28, 1, 7, 64), (448, 8, 64, 1))) == (7 * 2**28, 64)


def _made(page: int, len_q: tuple[int, ...], kv_len: tuple[int, ...], heads: int = 8, dim: int = 64) -> list:
    """Pages in random order, two KV heads, keys and values as halves of one tensor (Np, Hkv, Ps, 2 D), as vLLM has
    them. Slots past a length hold NaN, as do tokens past the last offset."""
    gen = torch.Generator().manual_seed(page)
    used = [-(-n // page) for n in kv_len]
    table = torch.full((len(kv_len), max(used) + 1), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(sum(used) + 1, generator=gen).int()
    both = torch.randn(len(order), 2, page, 2 * dim, generator=gen).bfloat16()
    for b, (n, keys) in enumerate(zip(used, kv_len, strict=True)):
        table[b, :n] = order[sum(used[:b]) :][:n]
        if keys % page:
            both[table[b, n - 1], :, keys % page :] = torch.nan
    q = torch.randn(sum(len_q) + 1, heads, dim, generator=gen).bfloat16()
    q[-1] = torch.nan
    offsets = torch.tensor([0, *len_q], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    halves = both.transpose(1, 2).split(dim, -1)  # (Np, Ps, Hkv, D) twice
    return [q, *halves, offsets, table, torch.tensor(kv_len, dtype=torch.int32)]


def _agrees(args: list, **kwargs) -> None:
    """With the reference, as parity has it."""
    reference = dispatch.OPS[NAME].module("reference").reference
    got = getattr(torch.ops.attnkit, NAME)(*args, **kwargs)
    double = [a.double() if a.dtype == torch.bfloat16 else a for a in args]
    for name, *three in zip(("out", "lse"), got, reference(*args, **kwargs), reference(*double, **kwargs), strict=True):
        check(name, *three)


@pytest.fixture
def ptx():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    dispatch._PLANS[NAME].clear()
    with torch_attnkit.simulate("sm100"):
        yield ptx
    dispatch._PLANS[NAME].clear()


@pytest.mark.simulator
@pytest.mark.seconds(600)
@pytest.mark.filterwarnings("ignore")
class TestSimulated:
    @pytest.mark.sample(9)
    @pytest.mark.parametrize("page", [16, 8, 24, 64, 128, 1, 256, 5, 12, 129])
    def test_pages_of_any_size_where_they_lie(self, ptx, page):
        """A chunk, a token, a sequence without queries, one shorter than its block, and drafts."""
        with ptx.settings(check=True, seed=page % 5):
            _agrees(_made(page, (40, 1, 0, 9, 3), (300, 131, 20, 4, 257)))

    @pytest.mark.proof
    @pytest.mark.parametrize("seed", [1, 2, 3])
    @pytest.mark.parametrize("kwargs", [dict(window=70, sink_tokens=5, softcap=20.0), dict(window=9, causal=False)])
    @pytest.mark.parametrize("page", [16, 1])
    def test_hostile_schedules(self, ptx, seed, kwargs, page):
        with ptx.settings(check=True, seed=seed):
            _agrees(_made(page, (40, 1, 70), (300, 131, 64)), **kwargs)

    @pytest.mark.proof
    @pytest.mark.parametrize("page", [16, 1])
    def test_heads_that_share_no_tile(self, ptx, page):
        """Six query heads a KV head do not divide 128 rows."""
        with ptx.settings(check=True, seed=1):
            _agrees(_made(page, (40, 9), (100, 131), heads=12))

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("page", [1, 16, 8, 64])
    def test_two_ctas_load_pieces(self, ptx, page):
        """Heads of 512: of K each CTA loads half the keys of a piece, of V half the columns."""
        with ptx.settings(check=True, seed=page % 5):
            _agrees(_made(page, (40, 1, 0, 9, 3), (300, 131, 20, 4, 257), dim=512))

    @pytest.mark.proof
    def test_rows_that_overlap(self, ptx):
        """Pages and heads that lie no multiple of a row apart: rows that are gathered then begin within each other."""
        args = _made(5, (40, 9), (100, 131))
        for i, gap in ((1, 8), (2, 40)):
            Np, Ps, Hkv, D = args[i].shape
            strides = (Ps * Hkv * (D + 8) + gap, Hkv * (D + 8), D + 8, 1)
            wide = torch.full((Np * strides[0],), torch.nan, dtype=args[i].dtype)
            args[i] = wide.as_strided((Np, Ps, Hkv, D), strides).copy_(args[i])
            assert plan.rows_of(Layout.of(args[i]))[1] < D
        with ptx.settings(check=True, seed=1):
            _agrees(args)

    @pytest.mark.proof
    @pytest.mark.parametrize("page", [16, 1])
    def test_lengths_and_offsets_change_under_one_plan(self, ptx, page):
        args = _made(page, (40, 1, 9), (300, 131, 64))
        args[:3] = (t.nan_to_num() for t in args[:3])
        with ptx.settings(check=True, seed=1):
            for offsets, lengths in (((0, 1, 2, 50), (300, 100, 60)), ((0, 0, 50, 50), (0, 131, 1))):
                args[3], args[5] = (torch.tensor(x, dtype=torch.int32) for x in (offsets, lengths))
                _agrees(args)
        assert len(dispatch._PLANS[NAME]) == 1

    @pytest.mark.proof
    @pytest.mark.parametrize("page", [16, 1])
    def test_nothing_is_read_that_is_not_there(self, ptx, page):
        """Offsets, lengths and tables that no caller should pass: the simulator refuses every access out of bounds.

        Sequences whose offsets overlap have rows that two CTAs write: that is no finding here.
        """
        args = _made(page, (40, 1, 9), (300, 131, 64))
        wild = torch.tensor([-(2**31), -1, 0, 7, 1 << 20, 2**31 - 1], dtype=torch.int32)
        with ptx.settings(check=True, seed=1, waive=("write_after_write",)):
            for seed in range(3):
                gen = torch.Generator().manual_seed(seed)
                for at in (3, 4, 5):
                    values = wild[torch.randint(len(wild), args[at].shape, generator=gen)]
                    args[at] = torch.where(torch.rand(args[at].shape, generator=gen) < 0.5, values, args[at])
                getattr(torch.ops.attnkit, NAME)(*args)

    @pytest.mark.proof
    @pytest.mark.parametrize(("page", "dim"), [(64, 64), (1, 64), (1, 128), (64, 512), (1, 512)])
    def test_the_work_is_that_of_packed_keys(self, ptx, page, dim):
        """The same products as over the same keys packed, the same bits, and no more bytes of TMA: boxes end where a
        sequence's pages do, blocks of packed keys with the next one's. Rows are gathered four at a time."""
        # Few rows at 512: packed sequences of more have two pairs of CTAs on neighbouring tiles, which share loads.
        args = _made(page, (60, 40, 1), (60, 200, 90), 2 if dim == 512 else 8, dim)
        args[:3] = (t.nan_to_num() for t in args[:3])
        q, k, v, ends, table, lengths = args
        rows = [table[b, torch.arange(n) // page].long() * page + torch.arange(n) % page for b, n in enumerate(lengths)]
        keys, values = (t.flatten(0, 1)[torch.cat(rows)].contiguous() for t in (k, v))
        starts = torch.tensor([0, *lengths.tolist()]).cumsum(0, dtype=torch.int32)
        hints = dict(causal=True, max_seqlen_q=60, max_seqlen_k=200)
        with ptx.settings(check=True, seed=1), ptx.counting() as launches:
            got = getattr(torch.ops.attnkit, NAME)(*args, **hints)
            want = torch.ops.attnkit.flash_attention_varlen(q, keys, values, ends, starts, **hints)[:2]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        pages, plain = (launch.counters for launch in launches)
        assert pages["flops"] == plain["flops"] and pages["tma_read"] <= plain["tma_read"]
        assert pages["instructions"] < {64: 1.05, 1: 1.5}[page] * plain["instructions"]
