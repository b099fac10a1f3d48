"""Sparse attention as it is cut: tokens in turn on a multiprocessor, tokens split over a cluster, wild indices."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.formats import kv_cache
from torch_attnkit.ops.sparse_fmha_with_swa.reference import reference
from torch_attnkit.oracle.compare import check

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]
NAMES = (
    "q swa_kv swa_end compressed_kv topk_indices compressed_len request_ids sink swa_block_table"
    " compressed_block_table global_scale"
).split()
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


def persistent() -> dict:
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


def resident_clusters() -> dict:
    """The same with so few keys that a CTA has them at once: 80, but for the last one's 33."""
    given = in_a_cluster()
    return given | dict(topk_indices=given["topk_indices"][:, :560].contiguous())


def in_clusters() -> dict:
    """A token of 70 heads by several clusters, which meet in device memory."""
    return dict(
        q=normal(1, 70, 512), swa_kv=normal(1, 40, 512, seed=1), swa_end=between(40, 40, 1),
        compressed_kv=normal(1, 2500, 512, seed=2), sink=normal(70, seed=4).float(),
    )  # fmt: skip


def two_head_blocks() -> dict:
    """Of 512 columns, beyond what the multiprocessors have at once, without entries."""
    return dict(q=normal(68, 66, 512), swa_kv=normal(1, 1100, 512, seed=1), swa_end=between(0, 110, 68), window=100)


def from_the_l2() -> dict:
    """Of 512 columns, two turns for some multiprocessors, and keys that all tokens share: two to six tiles."""
    return dict(
        q=normal(134, 3, 512), swa_kv=normal(1, 110, 512, seed=1), swa_end=between(0, 110, 134), window=100,
        compressed_kv=normal(1, 260, 512, seed=2), compressed_len=between(0, 260, 134, seed=1),
        sink=normal(3, seed=4).float(),
    )  # fmt: skip


def in_pages(case: dict, page: int) -> dict:
    """The same with both caches in pages, which lie in reverse order, of their requests in turn."""
    moved = dict(case)
    for cache, table in (("swa_kv", "swa_block_table"), ("compressed_kv", "compressed_block_table")):
        R, keys, size = case[cache].shape
        M = -(-keys // page)
        rows = torch.nn.functional.pad(case[cache], (0, 0, 0, M * page - keys)).view(R, M, page, size)
        moved[cache] = rows.transpose(0, 1).reshape(M * R, page, size).flip(0)
        moved[table] = (M * R - 1 - torch.arange(M) * R - torch.arange(R)[:, None]).to(torch.int32)
    return moved


def encoded(case: dict, format: str) -> dict:
    """The same with rows of a format, and of nvfp4 with a global scale."""
    scale = torch.tensor(700.0) if format == "nvfp4" else None
    caches = [name for name in ("swa_kv", "compressed_kv") if name in case]
    rows = {name: kv_cache.encode_rows(case[name], format, 64, scale) for name in caches}
    return case | rows | dict(global_scale=scale, format=format)


def uneven(case: dict) -> dict:
    """The same with requests, or pages, half a row farther apart."""
    moved = dict(case)
    for cache in ("swa_kv", "compressed_kv"):
        if cache in case:
            R, keys, D = case[cache].shape
            apart = keys * D + D // 2
            memory = torch.zeros(R * apart, dtype=case[cache].dtype)
            moved[cache] = memory.as_strided((R, keys, D), (apart, D, 1)).copy_(case[cache])
    return moved


def fp8_persistent() -> dict:
    """Tiles that are decoded while those of the work tile before are still multiplied."""
    return encoded(persistent(), "fp8")


def fp8_in_a_cluster() -> dict:
    return encoded(in_a_cluster(), "fp8")


def fp8_single_pass() -> dict:
    """A tile that three warpgroups decode."""
    return encoded(resident_clusters(), "fp8")


def nvfp4_pages_persistent() -> dict:
    """Without lengths a token would see the rest of its last page."""
    return in_pages(encoded(persistent(), "nvfp4"), 7)


def mxfp4_pages_in_clusters() -> dict:
    case = in_clusters()
    return in_pages(encoded(case | dict(compressed_len=between(2500, 2500, 1)), "mxfp4"), 16)


def pages_in_a_cluster() -> dict:
    return in_pages(in_a_cluster(), 16)


CASES = [
    in_a_cluster, persistent, two_head_blocks, from_the_l2, in_clusters, fp8_persistent, fp8_in_a_cluster,
    nvfp4_pages_persistent, mxfp4_pages_in_clusters, pages_in_a_cluster, resident_clusters, fp8_single_pass,
]  # fmt: skip


def compare(given: dict, meant: dict, seed: int, arch: str = "sm90") -> None:
    """What the kernel makes of ``given``, against the reference on what is meant."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    call = lambda function, values: function(
        *(values.get(name) for name in NAMES), **{n: v for n, v in values.items() if n not in NAMES}
    )
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=seed):
        got = call(torch.ops.attnkit.sparse_fmha_with_swa, given)
    double = {
        n: v.double() if isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float16) else v
        for n, v in meant.items()
    }
    for name, ours, low, high in zip(
        ("out", "lse", "row_sum"), got, call(reference, meant), call(reference, double), strict=True
    ):
        if high.numel():
            check(f"sparse_fmha_with_swa {name}", ours, low, high)


@pytest.mark.sample(29)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_work_is_cut_without_races(case, seed, arch):
    compare(case(), case(), seed, arch)


def late_keys(sign: float) -> dict:
    """No key in the first 128 entries of a list, then scores that grow by hundreds; in float16, whose probabilities
    would vanish or overflow beside a maximum that is not theirs."""
    gen = torch.Generator().manual_seed(5)
    q, far = (torch.randn(n, 512, generator=gen).half() for n in (20, 300))
    far = far * torch.linspace(0.1, 3, 300)[:, None].half() + sign * q[0] * torch.linspace(0.2, 2, 300)[:, None].half()
    chosen = torch.arange(300, dtype=torch.int32) - 40
    chosen[:140] = -1
    return dict(
        q=q[None], swa_kv=torch.zeros(1, 0, 512).half(), swa_end=torch.zeros(1, dtype=torch.int32),
        compressed_kv=far[None], topk_indices=chosen[None], normalize=False,
    )  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("multiprocessors", [1, 148])
@pytest.mark.parametrize("arch", ["sm100", "sm120"])
def test_maxima_begin_with_the_first_key_and_grow(sign, multiprocessors, arch, monkeypatch):
    monkeypatch.setattr(driver, "sm_count", lambda device: multiprocessors)
    compare(late_keys(sign), late_keys(sign), 1, arch)


def four_tiles(heads: int) -> dict:
    """Of 256 columns, of which two tiles and a part of a third fit in memory beside 64 heads."""
    return dict(
        q=normal(1, heads, 256), swa_kv=normal(2, 130, 256, seed=1), swa_end=between(120, 120, 1), window=100,
        compressed_kv=normal(2, 700, 256, seed=2), topk_indices=lists(1, 700, 400), sink=normal(heads, seed=4).float(),
        request_ids=between(1, 1, 1),
    )  # fmt: skip


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("heads", [40, 70])
@pytest.mark.parametrize("format", ["none", "fp8", "nvfp4"])
def test_tiles_that_nearly_fit_three_times(format, heads, seed, monkeypatch):
    """A producer must not wait for a tile's place before it has given away the tile ahead of it."""
    monkeypatch.setattr(driver, "sm_count", lambda device: 2 if heads > 64 else 1)
    case = uneven(four_tiles(heads)) if format == "none" else encoded(four_tiles(heads), format)
    compare(case, case, seed, "sm100")


@pytest.mark.proof
@pytest.mark.seconds(600)
def test_work_beside_flash_attention_4(monkeypatch):
    """DeepSeek-V4-Pro's 128 heads and 1152 keys of a token, by two CTAs in both. Its scheduler that steals work is off:
    it arrives at the cluster's barrier twice without a wait. Seen: 0.53 of its bytes and 0.951 of its warp
    instructions."""
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    from flash_attn.cute import flash_fwd_mla_sm100

    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    q, far = normal(1, 128, 512), normal(1, 2048, 512, seed=1)
    chosen = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[None, :1152].to(torch.int32)
    with torch_attnkit.simulate("sm100"), ptx.counting() as ours:
        torch.ops.attnkit.sparse_fmha_with_swa(q, far[:, :0], torch.zeros(1, dtype=torch.int32), far, chosen)
    kernel = flash_fwd_mla_sm100.FlashAttentionMLAForwardSm100
    begin = kernel.__init__
    monkeypatch.setattr(kernel, "__init__", lambda self, *a, **k: begin(self, *a, **k | dict(use_clc_scheduler=False)))
    with ptx.device("sm100"), ptx.counting() as theirs:
        from flash_attn.cute import flash_attn_func

        flash_attn_func(
            None, None, far[:, :, None], qv=q[None], gather_kv_indices=chosen[None], softmax_scale=512**-0.5
        )
    assert len(ours) == len(theirs) == 1 and ours[0].grid == theirs[0].grid == (2, 1, 1)
    counts, other = ours[0].counters, theirs[0].counters
    assert sum(counts["flops"].values()) == sum(other["flops"].values())
    read = [sum(c[name] for name in ("cp_async", "tma_read", "global_read")) for c in (counts, other)]
    assert read[0] <= 0.55 * read[1]
    assert counts["instructions"] <= 0.96 * other["instructions"]


def ends_of_lists(format: str) -> dict:
    """Tokens whose list of 600 ends early: behind a hole, after 257 entries, the first, none, and none that is known.
    Three begin, whose lists nobody looks through."""
    T, C, K = 8, 700, 600
    named = torch.tensor([600, 0, 600, 300, 257, 1, 0, 600])
    chosen = torch.where(torch.arange(K) < named[:, None], lists(T, C, K), -1)
    chosen[3, 40:298] = -1
    chosen[7] = C + 3
    given = dict(
        q=normal(T, 5, 128), swa_kv=normal(1, 30, 128, seed=1), swa_end=between(20, 30, T), window=20,
        compressed_kv=normal(1, C, 128, seed=2), topk_indices=chosen.to(torch.int32), sink=normal(5, seed=4).float(),
    )  # fmt: skip
    return given if format == "none" else encoded(given, format)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("format", ["none", "fp8"])
def test_ends_of_lists_that_name_nothing(format, seed, monkeypatch):
    monkeypatch.setattr(driver, "sm_count", lambda device: 3)
    given = ends_of_lists(format)
    compare(given, given | dict(topk_indices=given["topk_indices"].where(given["topk_indices"] < 700, -1)), seed)


def test_ends_of_lists_cost_nothing(monkeypatch):
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    monkeypatch.setattr(driver, "sm_count", lambda device: 3)
    given = ends_of_lists("none")
    full = given | dict(topk_indices=lists(8, 700, 600))
    done = []
    for case in (given, full):
        with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
            torch.ops.attnkit.sparse_fmha_with_swa(*(case.get(name) for name in NAMES), window=20)
        (launch,) = launches
        done.append(sum(launch.counters["flops"].values()))
    # Of 64 keys a tile: three tokens have 10 tiles, two 5, three the 2 that are the least; with full lists each has 10.
    assert done[0] * 80 == done[1] * 46


@pytest.mark.sample(4)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("listed", [True, False])
def test_wild_indices_name_no_keys(listed, arch):
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
    compare(given, meant, 1, arch)


@pytest.mark.sample(4)
@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100"])
@pytest.mark.parametrize("format", ["none", "fp8"])
def test_wild_tables_name_no_pages(format, arch):
    """A key in a page that is not there has no part in the result, and nothing is read for it."""
    given = persistent() | dict(request_ids=None, sink=None)
    given |= {name: given[name][:23] for name in ("q", "swa_end", "compressed_len")}
    given |= {name: given[name][:1] for name in ("swa_kv", "compressed_kv")}
    given = in_pages(encoded(given, format) if format != "none" else given, 5)
    T, C, far = 23, given["compressed_block_table"].shape[1] * 5, given["compressed_block_table"]
    wild = torch.tensor(WILD, dtype=torch.int32)[torch.arange(far.shape[1]) % len(WILD)]
    lost = torch.arange(far.shape[1]) % 3 == 1  # pages
    entry = torch.arange(C, dtype=torch.int32).expand(T, C)
    meant = given | dict(topk_indices=torch.where(lost[entry.long() // 5], -1, entry))
    # Of the window the pages from the seventh on are lost, before which all windows then end.
    short = dict(swa_end=given["swa_end"].clamp(max=35), window=35)
    near = torch.where(torch.arange(given["swa_block_table"].shape[1]) < 7, given["swa_block_table"], -5)
    compare(
        given | short | dict(compressed_block_table=torch.where(lost, wild, far), swa_block_table=near),
        meant | short, 1, arch,
    )  # fmt: skip
