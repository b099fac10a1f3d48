"""Sparse attention as it is cut: tokens in turn on a multiprocessor, tokens split over a cluster, wild indices."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.ops.sparse_fmha_with_swa.reference import reference
from torch_attnkit.oracle.compare import check

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]
NAMES = "q swa_kv swa_end compressed_kv topk_indices compressed_len request_ids sink".split()
WILD = (-(2**31), -2, -1, 1 << 20, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def between(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """int32 in [low, high]."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def lists(T: int, C: int, K: int) -> torch.Tensor:
    """(T, K) distinct entries, every fifth absent."""
    chosen = torch.rand(T, C, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :K].to(torch.int32)
    return torch.where(torch.arange(K) % 5 == 4, -1, chosen)


def in_turn() -> dict:
    """More work tiles than multiprocessors, with different numbers of tiles, some of them without keys."""
    T, R, S, C = 70, 3, 70, 50
    return dict(
        q=normal(T, 70, 128), swa_kv=normal(R, S, 128, seed=1), swa_end=between(0, S, T),
        compressed_kv=normal(R, C, 128, seed=2), compressed_len=between(0, C, T, seed=1) * (torch.arange(T) % 3 > 0),
        request_ids=between(0, R - 1, T, seed=2), sink=normal(70, seed=4).float(),
    )  # fmt: skip


def in_a_cluster() -> dict:
    """A token of 512 columns by eight CTAs, and one that has keys for the first of them only."""
    return dict(
        q=normal(2, 20, 512), swa_kv=normal(2, 40, 512, seed=1), swa_end=torch.tensor([40, 9], dtype=torch.int32),
        compressed_kv=normal(2, 1200, 512, seed=2), topk_indices=lists(2, 1200, 760),
        compressed_len=torch.tensor([1200, 0], dtype=torch.int32), window=33, normalize=False,
    )  # fmt: skip


def in_clusters() -> dict:
    """A token of 70 heads by several clusters, which meet in device memory."""
    return dict(
        q=normal(1, 70, 512), swa_kv=normal(1, 40, 512, seed=1), swa_end=between(40, 40, 1),
        compressed_kv=normal(1, 2500, 512, seed=2), sink=normal(70, seed=4).float(),
    )  # fmt: skip


def two_head_blocks() -> dict:
    """Of 512 columns, beyond what the multiprocessors have at once, without entries."""
    return dict(q=normal(68, 66, 512), swa_kv=normal(1, 110, 512, seed=1), swa_end=between(0, 110, 68), window=100)


def compare(given: dict, meant: dict, seed: int) -> None:
    """What the kernel makes of ``given``, against the reference on what is meant."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    call = lambda function, values: function(
        *(values.get(name) for name in NAMES), **{n: v for n, v in values.items() if n not in NAMES}
    )
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed):
        got = call(torch.ops.attnkit.sparse_fmha_with_swa, given)
    double = {
        n: v.double() if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16 else v for n, v in meant.items()
    }
    for name, mine, low, high in zip(
        ("out", "lse", "row_sum"), got, call(reference, meant), call(reference, double), strict=True
    ):
        if high.numel():
            check(f"sparse_fmha_with_swa {name}", mine, low, high)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", [in_a_cluster, in_turn, two_head_blocks, in_clusters], ids=lambda case: case.__name__)
def test_work_is_cut_without_races(case, seed):
    compare(case(), case(), seed)


@pytest.mark.parametrize("listed", [True, False])
def test_wild_indices_name_no_keys(listed):
    """Ends and lengths become those of the cache; a request or an entry that is not there has no keys."""
    T, R, S, C, K = 11, 2, 30, 40, 30
    wild = torch.tensor(WILD, dtype=torch.int32)[torch.arange(T) % len(WILD)]
    odd = torch.arange(T) % 2 == 1
    given = dict(
        q=normal(T, 5, 128), swa_kv=normal(R, S, 128, seed=1), compressed_kv=normal(R, C, 128, seed=2),
        swa_end=torch.where(torch.arange(T) % 3 == 1, wild, between(0, S, T)),
        compressed_len=torch.where(torch.arange(T) % 3 == 2, wild, between(0, C, T, seed=1)),
        request_ids=torch.where(torch.arange(T) % 4 == 3, wild, between(0, R - 1, T, seed=2)), window=20,
    )  # fmt: skip
    given |= dict(topk_indices=torch.where(odd, wild, 0)[:, None] + lists(T, C, K)) if listed else {}
    known = (given["request_ids"] >= 0) & (given["request_ids"] < R)
    meant = given | dict(
        swa_end=given["swa_end"].clamp(0, S) * known,
        compressed_len=given["compressed_len"].clamp(0, C) * known,
        request_ids=given["request_ids"] * known,
    )
    if listed:
        chosen = given["topk_indices"]
        meant["topk_indices"] = torch.where((chosen >= 0) & (chosen < C), chosen, -1)
    compare(given, meant, seed=1)
