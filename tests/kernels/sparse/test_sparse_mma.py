"""Sparse attention by ``mma.sync``: how work is cut on GPUs of 99 KB a CTA, and what the kernel spends."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.sparse.sm80.config import Config
from torch_attnkit.kernels.sparse.sm80.plan import TILES, plan
from torch_attnkit.kernels.sparse.sm90.plan import ALIGNED, share

from .test_sparse_fp4 import MXFP4, NVFP4, SWIZZLED, agrees
from .test_sparse_plan import ONE
from .test_sparse_work import (
    NAMES,
    between,
    compare,
    encoded,
    ends_of_lists,
    from_the_l2,
    in_a_cluster,
    in_clusters,
    in_pages,
    lists,
    normal,
    persistent,
)  # fmt: skip

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]
ARCHS = ("sm80", "sm89", "sm120")
SMS = (46, 82, 108, 170)  # RTX 3070, RTX 3090, A100, RTX 5090


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 128, 4096])
@pytest.mark.parametrize("listed", [0, 16, 512, 8192])
def test_shared_work_runs_at_the_same_time(tokens, heads, listed, sms):
    cut = plan(dataclasses.replace(ONE, tokens=tokens, heads=heads, listed=listed), sms)
    assert cut.ctas == 1 and cut.sizes["split_kv"] == (cut.groups > 1)
    assert cut.concurrent == tokens * -(-heads // cut.sizes["heads"])
    assert cut.groups == 1 or cut.concurrent * cut.groups <= 2 * sms
    assert share(ONE.keys, cut.groups) >= ALIGNED
    if cut.groups > 1:
        assert cut.counters == cut.concurrent
        assert cut.floats == cut.concurrent * cut.groups * Config(None, **cut.sizes).split.floats


def test_few_tokens_are_split_and_many_are_not():
    one, long = (plan(dataclasses.replace(ONE, listed=listed), 82) for listed in (512, 8192))
    assert one.concurrent * one.groups > 41 and long.concurrent * long.groups > 70
    assert one.sizes["heads"] == 8  # more CTAs
    many = plan(dataclasses.replace(ONE, tokens=4096), 82)
    assert many.groups == 1 and many.sizes["heads"] == 32  # each key is loaded for more heads


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("dim", TILES)
@pytest.mark.parametrize("format", kv_cache.FORMATS)
@pytest.mark.parametrize("rope", [0, 64, 128, 448, 512])
def test_shared_memory_fits(dim, format, rope, heads):
    if dim < rope or (format == "none" and rope):
        return
    problem = dataclasses.replace(ONE, dim=dim, heads=heads, tokens=4096, format=format, rope_dim=rope)
    c = Config(None, **plan(problem, 82).sizes)
    assert c.shared_bytes <= min(LIMITS[arch].shared for arch in ARCHS) and c.ahead >= 1
    assert c.shared.tiles.offset % 128 == 0 and c.shared.staging.offset % 16 == 0 and c.shared.valid.offset % 16 == 0
    # What lanes have: whole rows or whole chunks of a copy, 32 columns of O of four groups, and two or more keys.
    assert c.keys % c.warps == 0 and c.keys // c.warps * c.chunks % 32 == 0
    assert c.columns % 32 == 0 and c.rows % c.warps == 0 and c.lane_keys in (2, 4, 8)


@pytest.mark.sample(11)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("format", kv_cache.FORMATS)
@pytest.mark.parametrize("case", [in_a_cluster, in_clusters, from_the_l2, persistent], ids=lambda case: case.__name__)
def test_work_is_cut_without_races(case, format, seed, multiprocessors, arch, monkeypatch):
    """Whole and in splits, on schedules that delay what is asynchronous; every other one over pages."""
    monkeypatch.setattr(driver, "sm_count", lambda device: multiprocessors)
    given = case() if format == "none" else encoded(case(), format)
    if seed and case is not in_clusters:  # has no lengths: its last page would count
        given = in_pages(given, 7)
    compare(given, given, seed, arch)


@pytest.mark.parametrize("heads", [16, 32])
def test_keys_are_copied_once_and_without_bank_conflicts(heads, monkeypatch):
    """Rows that do not count are not read; copies, products and the exchange of sums wait for no bank."""
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    monkeypatch.setattr(driver, "sm_count", lambda device: 1)
    case = dict(
        q=normal(1, heads, 512), swa_kv=normal(1, 140, 512, seed=1), swa_end=between(140, 140, 1),
        compressed_kv=normal(1, 700, 512, seed=2), topk_indices=lists(1, 700, 400),
    )  # fmt: skip
    with torch_attnkit.simulate("sm80"), ptx.counting() as launches:
        torch.ops.attnkit.sparse_fmha_with_swa(*(case.get(name) for name in NAMES))
    (launch,) = launches
    c = launch.counters
    listed = int((case["topk_indices"] >= 0).sum())
    assert c["cp_async"] == (heads + 128 + listed) * 1024
    assert c["shared_wavefronts"] == c["shared_least_wavefronts"]
    tiles = -(-(128 + 399) // 32)  # the last place of the list is empty
    assert sum(c["flops"].values()) == 4 * heads * 32 * tiles * 512


def test_ends_of_lists_cost_nothing(monkeypatch):
    """Where a CTA has all keys of a token: tiles behind the last entry that there is are left out."""
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    monkeypatch.setattr(driver, "sm_count", lambda device: 1)
    given = ends_of_lists("none")
    done = []
    for case in (given, given | dict(topk_indices=lists(8, 700, 600))):
        with torch_attnkit.simulate("sm120"), ptx.counting() as launches:
            torch.ops.attnkit.sparse_fmha_with_swa(*(case.get(name) for name in NAMES), window=20)
        (launch,) = launches
        done.append(sum(launch.counters["flops"].values()))
    # Of 32 keys a tile: with full lists 20 each, else 20, 1, 20, 10, 9, 1, 1 and 1.
    assert done[0] * 160 == done[1] * 63


@pytest.mark.sample(5)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", [NVFP4, NVFP4 | SWIZZLED, MXFP4, MXFP4 | SWIZZLED], ids=lambda how: "-".join(how))
@pytest.mark.parametrize("case", [persistent, in_a_cluster], ids=lambda case: case.__name__)
def test_codes_are_those_of_the_numbers_that_attention_gives(case, how, arch):
    agrees(case(), 32, arch=arch, groups=2, **how)
