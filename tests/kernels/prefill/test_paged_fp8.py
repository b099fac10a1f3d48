"""Blocks of queries over pages of E4M3 on Hopper: any page, clusters, pairs and persistent CTAs, half the bytes."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.parity.judge import judge

from .test_paged import NAME, _made

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]
BLOCKS = (40, 1, 0, 9, 3), (300, 131, 20, 4, 257)  # a chunk, a token, none, one shorter than its block, drafts


@pytest.fixture
def ptx():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    dispatch._PLANS[NAME].clear()
    yield ptx
    dispatch._PLANS[NAME].clear()


def _codes(page: int, blocks: tuple = BLOCKS, dim: int = 64) -> tuple:
    """Slots past a length hold NaN."""
    q, k, v, *rest = _made(page, *blocks, 8, 2, dim)
    gen = torch.Generator().manual_seed(page)
    scales = [torch.rand(len(blocks[0]), 2, generator=gen) + 0.5 for _ in range(3)]
    return (*(t.to(torch.float8_e4m3fn).contiguous() for t in (q, k, v)), *rest, *scales)


def _agrees(args: tuple, **kwargs) -> None:
    judge(NAME, dispatch.OPS[NAME], "sm90", args, args, kwargs | dict(max_seqlen_q=40))


@pytest.mark.sample(5)
@pytest.mark.parametrize("page", [8, 24, 64, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(ptx, page, dim):
    args = _codes(page, dim=dim)
    with ptx.settings(check=True, seed=page % 4), ptx.counting() as launches:
        _agrees(args)
        _agrees(args, window=70, sink_tokens=5)
    assert len(launches) == 2


@pytest.mark.parametrize("ctas", [3, 8])
def test_keys_of_a_tile_shared_by_ctas(ptx, monkeypatch, ctas):
    made = plan.of_pages
    monkeypatch.setattr(plan, "of_pages", lambda p, sms: made(p, sms)._replace(ctas=ctas))
    with ptx.settings(check=True, seed=ctas):
        _agrees(_codes(16, ((2, 1, 4), (500, 64, 3))), softcap=20.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_pairs_of_tiles(ptx, monkeypatch, seed):
    made = plan.of_pages
    monkeypatch.setattr(plan, "_PAIRED_TILES", 0)
    monkeypatch.setattr(plan, "of_pages", lambda p, sms: made(p, 1))  # no clusters
    with ptx.settings(check=True, seed=seed):
        _agrees(_codes(16, ((40, 20), (210, 140))))


@pytest.mark.parametrize("page", [16, 64])
def test_persistent(ptx, monkeypatch, page):
    for limit in ("_SHARED_FROM", "_SHARED_KEYS"):
        monkeypatch.setattr(plan, limit, 0)
    args = _codes(page, ((3, 1, 0, 9, 16), (300, 1731, 20, 4, 257)))
    with ptx.settings(check=True, seed=1), ptx.counting() as launches:
        judge(NAME, dispatch.OPS[NAME], "sm90", args, args, dict(max_seqlen_q=16))
    assert launches[0].grid == (132, 1, 1)


def test_half_the_bytes_and_no_bank_conflicts(ptx):
    args = _codes(64, ((16,), (1024,)), 128)
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        torch.ops.attnkit.flash_attention_paged(*args, max_seqlen_q=16)
        wide = [t.bfloat16() for t in args[:3]]
        torch.ops.attnkit.flash_attention_paged(*wide, *args[3:7], max_seqlen_q=16)
    codes, wide = (launch.counters for launch in launches)
    assert codes["shared_wavefronts"] == codes["shared_least_wavefronts"]
    assert codes["tma_read"] <= 0.52 * wide["tma_read"]
