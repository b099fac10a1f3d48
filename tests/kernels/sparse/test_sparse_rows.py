"""How Blackwell brings keys to shared memory: boxes of TMA, four rows at a time, or row by row; by what lies where."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.kernels.sparse.sm100.plan import with_row_layout
from torch_attnkit.ops.sparse_fmha_with_swa.op import OP
from torch_attnkit.ops.sparse_fmha_with_swa.problem import problem

from .test_sparse_work import (
    NAMES,
    between,
    compare,
    in_a_cluster,
    in_pages,
    normal,
    pages_in_a_cluster,
    persistent,
    two_head_blocks,
    uneven,
)  # fmt: skip

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]
# Bytes of a line of 64 columns, of the rows of a box: of a warp's keys of a tile, where there are two sides and one.
BOX, WIDE, FOUR = 16 * 128, 32 * 128, 4 * 128


def token(heads: int, *, window: int = 0, listed: int = 0, entries: int = 0, dim: int = 512) -> dict:
    """One token with so many keys of its window, and so many of a list or all of the entries."""
    case = dict(q=normal(1, heads, dim), swa_kv=normal(2, 300, dim, seed=1), swa_end=between(290, 290, 1))
    case |= dict(window=window, request_ids=between(1, 1, 1))
    if listed or entries:
        case |= dict(compressed_kv=normal(2, entries or 2000, dim, seed=2))
    if listed:
        chosen = torch.rand(2000, generator=torch.Generator().manual_seed(3)).argsort()[:listed]
        case |= dict(topk_indices=chosen[None].to(torch.int32))
    return case


def counted(case: dict, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Counters of the launch, by a CTA or two that are both sides; of ``cp.async`` those that do not bring Q."""
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    sides = 2 if case["q"].shape[1] > 64 else 1
    monkeypatch.setattr(driver, "sm_count", lambda device: sides)
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        torch.ops.attnkit.sparse_fmha_with_swa(
            *(case.get(name) for name in NAMES), **{n: v for n, v in case.items() if n not in NAMES}
        )
    (launch,) = launches
    assert launch.grid == (sides, 1, 1)
    heads = case["q"].shape[1] if sides == 1 else 128
    padded = -(-heads // 16) * 16 if heads <= 32 else -(-heads // 64) * 64
    return launch.counters | dict(rows=launch.counters["cp_async"] - padded * case["q"].shape[2] * 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("far", [dict(), dict(entries=256)])
def test_dense_keys_come_in_boxes(heads, far, monkeypatch):
    """Windows, and entries without a list; once for both sides."""
    found = counted(token(heads, window=128, **far), monkeypatch)
    nbytes = (128 + far.get("entries", 0)) * 1024
    assert (
        found["rows"] == 0
        and found["tma_read"] == nbytes
        and found["tma_transactions"] == nbytes // (BOX if heads > 64 else WIDE)
    )


def test_two_sides_gather_listed_rows_four_at_a_time(monkeypatch):
    found = counted(token(128, window=128, listed=256), monkeypatch)
    assert found["rows"] == 0 and found["tma_read"] == (128 + 256) * 1024
    assert found["tma_transactions"] == 128 * 1024 // BOX + 256 * 1024 // FOUR


def test_entries_that_follow_one_another_are_no_single_rows(monkeypatch):
    case = token(128, window=0, listed=128)
    case["topk_indices"] = (torch.arange(128) // 16 * 37 + torch.arange(128) % 16)[None].to(torch.int32)
    assert counted(case, monkeypatch)["tma_transactions"] == 128 * 1024 // BOX


@pytest.mark.parametrize("heads", [16, 64])
def test_one_side_brings_listed_rows_one_by_one(heads, monkeypatch):
    found = counted(token(heads, window=128, listed=256), monkeypatch)
    assert found["rows"] == 256 * 1024
    assert found["tma_read"] == 128 * 1024 and found["tma_transactions"] == 128 * 1024 // WIDE


@pytest.mark.parametrize(("page", "whole"), [(16, 0), (64, 6)])
def test_groups_of_a_window_come_in_boxes_where_they_are_in_one_page(page, whole, monkeypatch):
    """Keys 162 to 289: of pages of 16 each group has parts of two."""
    found = counted(in_pages(token(128, window=128, listed=128), page), monkeypatch)
    assert found["rows"] == 0 and found["tma_transactions"] == whole * 8 + (16 - whole) * 4 * 8


def test_one_side_brings_pages_row_by_row(monkeypatch):
    found = counted(in_pages(token(64, window=128, listed=128), 64), monkeypatch)
    assert found["rows"] == 256 * 1024 and found["tma_read"] == 0


@pytest.mark.parametrize("heads", [64, 128])
def test_rows_at_uneven_distances_come_one_by_one(heads, monkeypatch):
    found = counted(uneven(token(heads, window=128, listed=128)), monkeypatch)
    assert found["rows"] == 256 * 1024 and found["tma_read"] == 0


def matrix(cache: torch.Tensor, **far: torch.Tensor) -> bool:
    """Whether TMA finds the rows of a call's caches."""
    case = dict(q=normal(1, 4, cache.shape[2]), swa_kv=cache, swa_end=between(0, 0, 1), request_ids=between(0, 0, 1))
    case |= far | dict(window=8, normalize=True, format="none", rope_dim=64)
    call = OP.bind(tuple(case.get(name) for name in OP.argnames))
    return with_row_layout(problem(call), call.arg.swa_kv, call.arg.compressed_kv).uniform


def test_which_caches_are_matrices():
    whole = normal(4, 40, 384)
    assert matrix(whole) and matrix(whole[:, 3:20]) and matrix(whole[::2]) and matrix(whole[..., :128])
    assert matrix(whole[:1].expand(3, 40, 384)) and matrix(whole[:1, ::2])
    assert not matrix(whole[:, ::3]), "40 rows from one request to the next are no multiple of 3"
    assert not matrix(whole[:, :1].expand(4, 40, 384)) and not matrix(whole[:, :1])
    assert not matrix(uneven(dict(swa_kv=whole))["swa_kv"])
    assert matrix(whole, compressed_kv=whole[:, :0]) and not matrix(whole[:, :0])
    assert not matrix(whole, compressed_kv=whole[:, ::3])


def of_padded_rows() -> dict:
    """Windows and entries of which half of each row is something else, of 128 columns and both sides."""
    case = persistent()
    return case | {name: torch.cat([case[name]] * 2, 2)[..., :128] for name in ("swa_kv", "compressed_kv")}


def of_one_request() -> dict:
    """All requests have the same keys, without a copy; one side."""
    case = in_a_cluster()
    return case | {name: case[name][:1].expand(2, -1, -1) for name in ("swa_kv", "compressed_kv")}


def runs() -> dict:
    """Lists of entries that follow one another, mostly, so that groups are boxes by chance, or nearly."""
    T, K = 9, 150
    start = between(0, 400, T, 10, seed=7) * 16
    chosen = (start[:, :, None] + torch.arange(15)).reshape(T, K)
    chosen[::3, ::32] = -1
    return dict(
        q=normal(T, 128, 128), swa_kv=normal(1, 300, 128, seed=1), swa_end=between(0, 300, T), window=45,
        compressed_kv=normal(1, 8000, 128, seed=2), topk_indices=chosen.to(torch.int32),
        compressed_len=between(2000, 8000, T),
    )  # fmt: skip


def all_entries() -> dict:
    """Without a list, of one side and 256 columns: windows that end anywhere, then whole tiles."""
    return dict(
        q=normal(5, 40, 256), swa_kv=normal(1, 90, 256, seed=1), swa_end=between(0, 90, 5), window=33,
        compressed_kv=normal(1, 700, 256, seed=2), compressed_len=between(300, 700, 5), sink=normal(40, seed=4).float(),
    )  # fmt: skip


def whole_pages() -> dict:
    """The same in pages."""
    return in_pages(all_entries(), 64)


def uneven_persistent() -> dict:
    return uneven(persistent())


def uneven_in_a_cluster() -> dict:
    return uneven(in_a_cluster())


def uneven_pages() -> dict:
    return uneven(pages_in_a_cluster())


def uneven_head_blocks() -> dict:
    case = two_head_blocks() | dict(swa_kv=normal(2, 1100, 512, seed=1))
    return uneven(case)


CASES = [
    of_padded_rows, of_one_request, runs, all_entries, whole_pages, uneven_persistent, uneven_in_a_cluster,
    uneven_pages, uneven_head_blocks,
]  # fmt: skip


@pytest.mark.sample(9)
@pytest.mark.parametrize("multiprocessors", [2, 148])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_rows_from_anywhere_come_without_races(case, seed, multiprocessors, monkeypatch):
    monkeypatch.setattr(driver, "sm_count", lambda device: multiprocessors)
    compare(case(), case(), seed, "sm100")


@pytest.mark.parametrize("heads", [64, 128])
def test_what_no_token_sees_is_not_multiplied(heads, monkeypatch):
    """Beside the window, and where a list has no entries, are NaN, which 0 would not hide."""
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    case = token(heads, window=100, listed=90)
    case["topk_indices"][:, 40:50] = -1
    hidden = torch.ones(2, 300, dtype=torch.bool)
    hidden[1, 190:290] = False
    case["swa_kv"] = case["swa_kv"].masked_fill(hidden[..., None], torch.nan)
    hidden = torch.ones(2, 2000, dtype=torch.bool)
    hidden[1, case["topk_indices"][case["topk_indices"] >= 0].long()] = False
    case["compressed_kv"] = case["compressed_kv"].masked_fill(hidden[..., None], torch.nan)
    meant = case | {name: case[name].nan_to_num() for name in ("swa_kv", "compressed_kv")}
    compare(case, meant, 1, "sm100")
