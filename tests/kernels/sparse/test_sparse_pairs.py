"""Encoded rows on Hopper where two head blocks of a token decode half of its rows each and exchange the numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.cuda import driver
from torch_attnkit.kernels.sparse.sm90 import plan
from torch_attnkit.kernels.sparse.sm90.config import CONSUMERS

from .test_sparse_work import NAMES, between, compare, encoded, in_pages, lists, normal

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default"), pytest.mark.seconds(300)]
OP = "sparse_fmha_with_swa"


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    dispatch._PLANS[OP].clear()
    yield
    dispatch._PLANS[OP].clear()


def case(tokens: int, listed: int, format: str, *, heads: int = 100, dim: int = 512, dtype=torch.bfloat16) -> dict:
    """Windows of up to 60 keys, and a list of which every fifth entry is absent."""
    entries = max(listed, 100)
    rows = encoded(
        dict(
            q=normal(tokens, heads, dim), swa_kv=normal(2, 70, dim, seed=1), swa_end=between(0, 70, tokens), window=60,
            compressed_kv=normal(2, entries, dim, seed=2), topk_indices=lists(tokens, entries, listed),
            request_ids=between(0, 1, tokens, seed=2), sink=normal(heads, seed=4).float(),
        ),
        format,
    )  # fmt: skip
    return rows | dict(q=rows["q"].to(dtype))


def persistent() -> dict:
    """Two pairs on four multiprocessors, two to five tiles a token."""
    return case(5, 90, "fp8")


def persistent_from_pages() -> dict:
    return in_pages(case(3, 60, "mxfp4", dtype=torch.float16), 16)


def persistent_of_256_columns() -> dict:
    return case(5, 200, "nvfp4", dim=256)


def persistent_of_128_columns() -> dict:
    return case(7, 330, "fp8", dim=128, heads=250)


def in_a_cluster() -> dict:
    """Two or more CTAs share a token's keys with as many of the other side."""
    return case(16, 150, "fp8")


def in_clusters() -> dict:
    """Several of these, which meet in device memory."""
    return case(1, 330, "nvfp4")


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("made", "multiprocessors", "cut"),
    [
        (persistent, 4, (1, 1, 2)), (persistent, 4, (1, 1, 1)), (persistent_from_pages, 5, (1, 1, 2)),
        (persistent_of_256_columns, 4, (1, 1, 2)), (persistent_of_128_columns, 8, (1, 1, 2)),
        (in_a_cluster, 132, (3, 1, 2)), (in_clusters, 132, (2, 2, 2)),
    ],
)  # fmt: skip
def test_sides_exchange_rows_without_races(made, multiprocessors, cut, seed, monkeypatch):
    """Whatever the plan would find best; and the same without sides."""
    paired(monkeypatch, cut[2] == plan.SIDES)
    monkeypatch.setattr(driver, "sm_count", lambda device: multiprocessors)
    monkeypatch.setattr(plan, "cost", lambda problem, work, sms, other: other != cut)
    compare(made(), made(), seed)


def paired(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(plan, "PAIRED_TOKENS", 1 if yes else 1 << 30)


def counted(given: dict) -> tuple[dict, tuple[torch.Tensor, ...]]:
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    dispatch._PLANS[OP].clear()
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        got = torch.ops.attnkit.sparse_fmha_with_swa(
            *(given.get(name) for name in NAMES), **{n: v for n, v in given.items() if n not in NAMES}
        )
    (launch,) = launches
    assert launch.grid == (2, 1, 1)
    return launch.counters, got


@pytest.mark.sample(2)
@pytest.mark.parametrize(("format", "row", "conversions"), [("fp8", 584, 39), ("mxfp4", 368, 7), ("nvfp4", 380, 15)])
def test_a_row_is_decoded_once_for_two_head_blocks(format, row, conversions, monkeypatch):
    """1152 keys, all of them there; to the bit what each head block by itself makes of them. ``conversions`` of a warp
    for a row."""
    keys, listed = 1152, 1024
    given = case(1, listed, format, heads=128) | dict(
        swa_kv=case(1, listed, format)["compressed_kv"][:, :128], swa_end=between(128, 128, 1), window=128,
        topk_indices=torch.arange(listed, dtype=torch.int32)[None].flip(1),
    )  # fmt: skip
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    monkeypatch.setattr(plan, "cost", lambda problem, work, sms, cut: cut[:2] != (1, 1))
    found = []
    for yes in (False, True):
        paired(monkeypatch, yes)
        found.append(counted(given))
    (alone, alone_out), (shared, paired_out) = found
    for one, other in zip(alone_out, paired_out, strict=True):
        assert torch.equal(one, other)
    # Rows that come whole have their scales, and what is before a multiple of 16 bytes, copied by themselves besides.
    one_copy, two_copies = (c["cp_async"] + c["tma_read"] - 128 * 1024 for c in (shared, alone))
    assert two_copies == 2 * one_copy and keys * row <= one_copy <= keys * (row + 16)
    assert alone["by_class"]["convert"] - shared["by_class"]["convert"] >= keys * conversions
    # Of the producer, whose share beside decoding remains: whose row is whose, and where it lies.
    assert sum(shared["by_warp"][CONSUMERS:]) < 0.68 * sum(alone["by_warp"][CONSUMERS:])
    assert shared["flops"] == alone["flops"]
