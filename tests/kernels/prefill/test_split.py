"""sdpa_multi on a simulated B200 with the keys of a tile split: how many CTAs, what they read, what comes out."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.cuda import driver
from torch_attnkit.kernels.prefill.sm100 import split_plan
from torch_attnkit.kernels.prefill.sm100.split_plan import Work, cheapest
from torch_attnkit.oracle.compare import check

B200 = 148  # multiprocessors


def work(queries: int, batch: int, keys: int, group: int = 4, heads: int = 8, dim: int = 128) -> Work:
    """Blocks of 128 keys; up to 128 rows are one tile, more are rounds of two."""
    rows = queries * group
    tiles = 1 if rows <= 128 else 2
    rounds = -(-rows // (128 * tiles))
    return Work(rounds, tiles, batch * heads, -(-keys // 128), 128, dim, dim, batch * queries * group * heads)


def test_few_sequences_fill_the_machine():
    """32/8 heads, D 128, 8192 keys: 8 CTAs without splits."""
    for queries in (16, 32, 64):
        assert 8 * cheapest(work(queries, 1, 8192), B200) > 0.8 * B200
    assert 4 * 8 * cheapest(work(16, 4, 8192), B200) > 0.8 * B200


def test_tiles_that_fill_the_machine_keep_their_keys():
    assert cheapest(work(16, 16, 8192), B200) == 1  # 128 tiles
    assert cheapest(work(512, 8, 32768), B200) == 1
    assert cheapest(work(16, 1, 128), B200) == 1  # one block
    assert cheapest(work(16, 1, 512), B200) == 1  # no longer than what a merge costs


@pytest.mark.parametrize("sms", [1, 20, 132, 148, 160])
def test_more_multiprocessors_more_splits(sms):
    for keys in (1, 700, 8192, 1 << 20):
        for batch in (1, 3, 1000):
            few, many = (cheapest(work(16, batch, keys), n) for n in (sms, 2 * sms))
            assert 1 <= few <= max(1, min(sms, -(-keys // 128)))
            assert work(16, batch, keys).cost(many, 2 * sms) <= work(16, batch, keys).cost(few, sms)


FEATURES = [
    dict(causal=False),
    dict(causal=False, window=200),
    dict(window=200),
    dict(window=130, sink_tokens=300),
    dict(causal=False, window=100, sink_tokens=7),
    dict(softcap=20.0),
]
simulated = [
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.seconds(600),
    pytest.mark.sample(12),
]


def _inputs(B: int, T: int, Hq: int, Hkv: int, S: int, D: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(S + D)
    shapes = (B, T, Hq, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return [torch.randn(*shape, generator=gen).bfloat16() for shape in shapes]


def _agrees(args: tuple, kwargs: dict) -> None:
    """With the reference, as parity has it."""
    reference = dispatch.OPS["sdpa_multi"].module("reference").reference
    got = torch.ops.attnkit.sdpa_multi(*args, **kwargs)
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
    for name, *three in zip(("out", "lse"), got, reference(*args, **kwargs), reference(*double, **kwargs), strict=True):
        check(name, *three)


@pytest.fixture
def ptx():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    dispatch._PLANS["sdpa_multi"].clear()
    with torch_attnkit.simulate("sm100"):
        yield ptx
    dispatch._PLANS["sdpa_multi"].clear()


class TestSimulated:
    pytestmark = simulated

    def test_every_key_is_read_once_by_many_ctas(self, ptx):
        """One sequence of 8192 keys: two launches, most multiprocessors, and K and V once whatever the splits."""
        q, k, v = _inputs(1, 16, 32, 8, 8192, 128)
        planned = cheapest(work(16, 1, 8192), driver.sm_count(q.device))
        with ptx.counting() as launches:
            _agrees((q, k, v, torch.tensor([8192], dtype=torch.int32)), {})
        attend, _merge = launches
        ctas = attend.grid[0]
        assert ctas == 8 * planned > 0.8 * driver.sm_count(q.device)
        queries = ctas * 128 * 128 * 2  # every CTA has its tile's, 64 rows and as many of padding
        assert attend.counters["tma_read"] - queries == (k.numel() + v.numel()) * 2

    @pytest.mark.parametrize("seed", [1, 2, 3])
    @pytest.mark.parametrize("dim", [64, 256])
    def test_lengths_change_under_one_plan(self, ptx, monkeypatch, dim, seed):
        """Full, short, shorter than the block of queries, and empty sequences; what was left behind does no harm."""
        monkeypatch.setattr(split_plan, "cheapest", lambda work, sms: 5)
        q, k, v = _inputs(3, 5, 8, 2, 700, dim)
        with ptx.settings(check=True, seed=seed), ptx.counting() as launches:
            for lengths in ((700, 130, 3), (0, 699, 385), (1, 2, 700)):
                kv_len = torch.tensor(lengths, dtype=torch.int32)
                _agrees((q, k, v, kv_len, torch.randn(8), torch.tensor([0, 40, 2], dtype=torch.int32)), {})
        assert len(launches) == 6 and len(dispatch._PLANS["sdpa_multi"]) == 1

    @pytest.mark.parametrize("kwargs", FEATURES, ids=lambda kwargs: "-".join(kwargs))
    def test_features(self, ptx, monkeypatch, kwargs):
        """With splits between a window's blocks and the sink tokens', and a second tile of queries."""
        monkeypatch.setattr(split_plan, "cheapest", lambda work, sms: 4)
        n = FEATURES.index(kwargs)
        start = torch.tensor([3, 140], dtype=torch.int32) if n % 2 else None
        q, k, v = _inputs(2, 40, 8, 1, 700, 64)
        lengths = torch.tensor([700, 611], dtype=torch.int32)
        with ptx.settings(check=True, seed=n % 4):
            _agrees((q, k, v, lengths, torch.randn(8), start), kwargs)
