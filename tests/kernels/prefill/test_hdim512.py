"""Heads of 512 on Hopper, whose output two warpgroups share: what is on its way, what is read, and that it is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_attnkit
from torch_attnkit import digest
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda import driver
from torch_attnkit.kernels import prefill
from torch_attnkit.kernels.prefill.problem import Layout, Problem
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, heads
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle.compare import check

DIM = 512
SHARED = 227 << 10  # bytes that a block may have
NOWHERE = Layout((), ())


def problem(heads: int, kv_heads: int) -> Problem:
    sizes = (1, 4096, 4096, heads, kv_heads, DIM, DIM, Scores(DIM), NOWHERE, NOWHERE, NOWHERE)
    return Problem(torch.bfloat16, torch.device("cpu"), *sizes, causal=True)


@pytest.mark.parametrize(("of_q", "of_kv", "pair"), [(16, 2, True), (6, 1, True), (4, 4, False), (6, 2, False)])
def test_heads_that_share_keys_pair(of_q, of_kv, pair):
    assert plan.signature(problem(of_q, of_kv))["pair"] == pair


def test_shared_memory_has_room():
    """Q, the stages of K and V, two messages of P and factors; barriers and notes take less than a kilobyte."""
    for dim, dim_v in heads(BITS16, wide=True):
        t = TILES[BITS16, dim, dim_v].full
        operands = 2 * (t.tile_m * dim * t.q_stages + t.tile_n * (dim + dim_v) * t.stages + 2 * t.tile_m * t.tile_n)
        assert operands + 2 * 4 * t.tile_m + 1024 <= SHARED


def test_other_heads_do_not_depend_on_it():
    """Their kernels are another file's: what an H200 has shown of them stays true when this one changes."""
    for name in ("flash_attention", "flash_attention_varlen"):
        rows = [row for row in OPS[name].kernels if row.on == "sm90"]
        assert [row.dims["D"] for row in rows if row.launcher == prefill.HOPPER_HDIM512] == [(DIM,)]
        hdim512 = "torch_attnkit.kernels.prefill.sm90.mainloop_hdim512"
        for row in rows:
            reached = hdim512 in digest.reach(*OPS[name].entries(row), arch="sm90")
            assert reached == (row.launcher == prefill.HOPPER_HDIM512)


simulated = [
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.seconds(600),
    pytest.mark.sample(8),
]


@pytest.fixture
def ptx():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    return ptx


def _qkv(tokens: int, keys: int, heads: int, kv_heads: int, batch: int = 1) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(batch, n, h, DIM, generator=gen).bfloat16() for n, h in shapes]


def _results(args: tuple, options: dict) -> list[tuple[torch.Tensor, ...]]:
    """In the tensors' dtype and in float64."""
    wide = lambda t: t.double() if torch.is_tensor(t) and t.dtype == torch.bfloat16 else t
    return [torch.ops.attnkit.flash_attention(*map(f, args), **options) for f in (lambda t: t, wide)]


CASES = {
    "causal": dict(causal=True),
    "partial": dict(causal=True, normalize=False),
    "window": dict(causal=True, window=70, sink_tokens=3),
    "capped": dict(softcap=3.0),
}


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["pairs", "alone"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
class TestTiles:
    pytestmark = simulated

    def test_a_cta_takes_several(self, ptx, monkeypatch, options, heads):
        """Checked, on four multiprocessors: messages and stages go round, also from a tile to the next. Scores grow
        along the keys of one sequence, and keys at which nobody looks are NaN."""
        monkeypatch.setattr(driver, "sm_count", lambda device: 4)
        q, k, v = _qkv(197, 150, *heads, batch=2)
        k[0] *= torch.linspace(0.2, 3, 150)[:, None, None]
        ends = torch.tensor([150, 111], dtype=torch.int32)
        k[1, 111:] = v[1, 111:] = torch.nan
        args = (q, k, v, None, ends)
        low, high = _results(args, options)
        for seed in (0, 3):
            with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
                got = torch.ops.attnkit.flash_attention(*args, **options)
            assert [launch.grid[0] for launch in launches] == [4]
            assert not launches[0].notes
            for name, *three in zip(("out", "lse", "row_sum"), got, low, high, strict=True):
                check(f"flash_attention {name}", *three)


class TestWork:
    pytestmark = simulated

    @pytest.mark.parametrize("heads", [2, 3])
    def test_no_product_is_done_twice(self, ptx, heads):
        """Two products of all rows with all keys; a pair reads keys and values once for both of its heads."""
        q, k, v = _qkv(128, 256, heads, 1)
        with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
            torch.ops.attnkit.flash_attention(q, k, v)
        (launch,) = launches
        assert launch.counters["flops"] == {"wgmma bf16": 4 * 128 * 256 * DIM * heads}
        tiles = 2 * heads
        reads = tiles * (64 * DIM + 2 * 256 * DIM // (2 if heads == 2 else 1))
        assert launch.counters["tma_read"] == 2 * reads
        # Rows of P swizzle: no store of them waits for another.
        assert launch.counters["shared_wavefronts"] == launch.counters["shared_least_wavefronts"]

    @pytest.mark.proof
    def test_one_block_in_flight_is_as_right(self, ptx, monkeypatch):
        """Other tiles than the chosen, which the docs compare with them."""
        key = BITS16, DIM, DIM
        chosen = dataclasses.replace(TILES[key].full, tile_n=64, stages=1)
        monkeypatch.setitem(TILES, key, dataclasses.replace(TILES[key], full=chosen))
        args = (*_qkv(70, 130, 2, 1), torch.tensor([0.5, -1.0]))
        low, high = _results(args, dict(scale=0.05))
        with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=1):
            got = torch.ops.attnkit.flash_attention(*args, scale=0.05)
        for name, *three in zip(("out", "lse"), got, low, high, strict=False):
            check(f"flash_attention {name}", *three)
