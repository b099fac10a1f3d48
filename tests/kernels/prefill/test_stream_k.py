"""Persistent CTAs that share the keys of a batch on Hopper: any lengths, a tile split among many, the same bits."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle.compare import check

from .test_cached_plan import H200, NOWHERE, Problem
from .test_paged import _agrees as _agrees_over_pages
from .test_paged import _made
from .test_paged import problem as paged_problem

NAME = "sdpa_multi"
# Nothing at all, one key, one block, all of one CTA, and one that every CTA has a split of.
LENGTHS = {"even": (300,) * 5, "ragged": (0, 1, 64, 700, 129), "one-long": (3, 2500, 5, 0, 1), "none": (0,) * 5}


def _problem(batch: int, rows: int, kv_heads: int = 8, dim: int = 128, keys: int = 8192) -> Problem:
    sizes = (batch, rows, keys, 4 * kv_heads, kv_heads, dim, dim, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
    return Problem(torch.bfloat16, torch.device("cpu"), *sizes, causal=True, cached=True)


def test_batches_of_few_rows_are_shared():
    assert plan.of_cache(_problem(16, 16), H200) == plan.Plan(TILES[BITS16, 128, 128].few_rows, stream_k=H200)
    for few_tiles in (_problem(1, 16), _problem(4, 16)):
        assert plan.of_cache(few_tiles, H200).stream_k == 0
    for others in (_problem(16, 17), _problem(16, 16, dim=256), _problem(16, 16, keys=2048)):
        assert plan.of_cache(others, H200).stream_k == 0
    assert plan.of_pages(paged_problem(64, 64, 1, 8192), H200).stream_k == H200
    assert plan.of_pages(paged_problem(64, 64, 1, 8192, page=1), H200).stream_k == 0  # threads copy rows


simulated = [
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.seconds(600),
    pytest.mark.sample(6),
]


@pytest.fixture
def ptx(monkeypatch):
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    for limit in ("_SHARED_FROM", "_SHARED_KEYS"):
        monkeypatch.setattr(plan, limit, 0)
    plans = [dispatch._PLANS[name] for name in (NAME, "flash_attention_paged")]
    for kept in plans:
        kept.clear()
    with torch_attnkit.simulate("sm90"):
        yield ptx
    for kept in plans:
        kept.clear()


def _args(lengths: tuple[int, ...], dim: int, dtype: torch.dtype, queries: int = 3) -> list:
    gen = torch.Generator().manual_seed(dim)
    batch, keys = len(lengths), max(max(lengths), 1)
    shapes = (batch, queries, 4, dim), (batch, 2, keys, dim), (batch, 2, keys, dim)
    return [
        *(torch.randn(shape, generator=gen).to(dtype) for shape in shapes),
        torch.tensor(lengths, dtype=torch.int32),
        torch.randn(4, generator=gen),
        torch.tensor([max(0, n // 3 - 1) for n in lengths], dtype=torch.int32),
    ]


def _agrees(args: list, **kwargs) -> None:
    """With the reference, as parity has it."""
    reference = dispatch.OPS[NAME].module("reference").reference
    got = getattr(torch.ops.attnkit, NAME)(*args, **kwargs)
    exact = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
    for name, *three in zip(("out", "lse"), got, reference(*args, **kwargs), reference(*exact, **kwargs), strict=True):
        check(name, *three)


class TestSimulated:
    pytestmark = simulated

    @pytest.mark.sample(25)
    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("dim", [32, 64, 96, 128])
    def test_any_lengths(self, ptx, lengths, dim):
        args = _args(LENGTHS[lengths], dim, torch.bfloat16)
        with ptx.settings(check=True, seed=dim), ptx.counting() as launches:
            _agrees(args[:4])
            _agrees(args, window=70, sink_tokens=5)
            _agrees(args, causal=False, softcap=3.0)
        assert [launch.grid for launch in launches] == [(H200, 1, 1)] * 3

    @pytest.mark.parametrize("queries", [1, 16])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_the_same_bits_whoever_comes_last(self, ptx, dtype, queries):
        args = _args(LENGTHS["one-long"], 64, dtype, queries)
        results = []
        for seed in range(3):
            with ptx.settings(check=True, seed=seed):
                results.append(torch.cat([r.flatten() for r in torch.ops.attnkit.sdpa_multi(*args)]))
        assert all(torch.equal(results[0], result) for result in results)

    @pytest.mark.parametrize("page", [8, 16, 64, 256])
    def test_pages(self, ptx, page):
        """Tokens and drafts, a sequence without queries, one shorter than its block, and rows behind the last."""
        args = _made(page, (3, 1, 0, 9, 16), (300, 1731, 20, 4, 257), 8, 2)
        with ptx.settings(check=True, seed=page % 4), ptx.counting() as launches:
            _agrees_over_pages(args, max_seqlen_q=16)
            _agrees_over_pages(args, max_seqlen_q=16, window=70, sink_tokens=5)
        assert [launch.grid for launch in launches] == [(H200, 1, 1)] * 2
