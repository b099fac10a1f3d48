"""Sparse attention on Metal: how it is cut, wild indices, and what crosses the bus."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attnkit
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.sparse import metal as sparse
from torch_attnkit.kernels.sparse import metal_plan
from torch_attnkit.kernels.sparse.problem import Problem
from torch_attnkit.mps import cores, library
from torch_attnkit.ops.sparse_fmha_with_swa import cases
from torch_attnkit.ops.sparse_fmha_with_swa.reference import reference
from torch_attnkit.oracle.compare import check
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
op = torch.ops.attnkit.sparse_fmha_with_swa
WILD = (-(2**31), -2, 1 << 20, 2**31 - 1)
MEMORY = 32768  # bytes of a threadgroup


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def compare(given: dict[str, Any], meant: dict[str, Any]) -> None:
    """What the kernel makes of ``given``, against the reference on what is meant."""
    with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
        got = op(**given)
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in meant.items()}
    for name, ours, low, high in zip(
        ("out", "lse", "row_sum"), got, reference(**meant), reference(**wide), strict=True
    ):
        check(name, ours, low, high)


def test_indices_that_lie_are_no_keys():
    """Entries, ends, lengths, requests and pages that are not there; one token has a request that is not there."""
    q, near, far = normal(5, 9, 128), normal(2, 12, 128, seed=1), normal(2, 30, 128, seed=2)
    chosen = torch.arange(25).repeat(5, 1).to(torch.int32)
    wild = chosen.clone()
    for i, value in enumerate(WILD):
        wild[:, 5 * i] = value
    meant = dict(
        q=q, swa_kv=near, swa_end=ints(12, 0, 5, 12, 0), compressed_kv=far,
        topk_indices=chosen.where(chosen == wild, -1), compressed_len=ints(30, 0, 30, 13, 0),
        request_ids=ints(0, 1, 1, 0, 0), window=7,
    )  # fmt: skip
    given = meant | dict(
        topk_indices=wild, swa_end=ints(2**31 - 1, -(2**31), 5, 13, 4), compressed_len=ints(2**31 - 1, -1, 31, 13, 9),
        request_ids=ints(0, 1, 1, 0, 2),
    )  # fmt: skip
    compare(given, meant)


@pytest.mark.proof
def test_pages_that_are_not_there_have_no_keys():
    q, near, far = normal(2, 3, 128), normal(4, 6, 128, seed=1), normal(5, 8, 128, seed=2)
    table = ints(4, 7, 2, -3, 1, 2**31 - 1, 0, -(2**31)).view(2, 4)
    given = dict(
        q=q, swa_kv=near, swa_end=ints(12, 8), swa_block_table=ints(3, 1, 0, 2).view(2, 2), compressed_kv=far,
        compressed_block_table=table, window=20,
    )  # fmt: skip
    keys = torch.arange(32).repeat(2, 1)
    live = (table[:, :, None].expand(2, 4, 8).flatten(1) >= 0) & (table[:, :, None].expand(2, 4, 8).flatten(1) < 5)
    meant = given | dict(
        compressed_block_table=table.where((table >= 0) & (table < 5), 0),
        topk_indices=keys.where(live, -1).to(torch.int32),
    )
    compare(given, meant)


@pytest.mark.proof
@pytest.mark.parametrize(("fmt", "heads", "most"), [(0, 64, 1.05), (1, 64, 1.1), (0, 128, 1.85)])
def test_keys_of_64_heads_are_loaded_once(fmt: int, heads: int, most: float):
    """Device bytes to least bytes, by loads, where tokens fill 40 cores; 128 heads are two threadgroups."""
    dims = dict(Tq=40, Hq=heads, R=40, S=128, C=80, K=80, D=512, window=128, compressed=1, topk=1, sink=1, fmt=fmt)
    args, kwargs = cases.bench(dims, torch.bfloat16, torch.Generator().manual_seed(0))
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(*args, **kwargs)
    (report,) = reports
    assert report.device_bytes <= most * cases.bytes(dims, torch.bfloat16)


@pytest.mark.proof
@pytest.mark.parametrize("sink", [False, True])
def test_more_splits_than_lanes_are_merged(sink: bool, monkeypatch: pytest.MonkeyPatch):
    """Of 40 the last has fewer keys, and those of one in the middle do not count."""
    keys, cut = 32 * 40, metal_plan.plan
    monkeypatch.setattr(sparse, "plan", lambda *given: dataclasses.replace(cut(*given), splits=40, whole=0))
    q, near, far = normal(1, 3, 128), normal(1, 8, 128, seed=1), normal(1, keys, 128, seed=2)
    chosen = torch.arange(keys - 20, dtype=torch.int32)[None]
    chosen[:, 32 * 20 : 32 * 22] = -1
    given = dict(q=q, swa_kv=near, swa_end=ints(8), compressed_kv=far, topk_indices=chosen, window=8, normalize=sink)
    if sink:
        given["sink"] = torch.tensor([0.5, -torch.inf, 9.0])
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(**given)
    attend, merge = reports
    assert attend.buffers["parts"][1] == 40 * 3 * 128 * q.itemsize
    # Statistics of a split are read once by each of two passes, not by every lane.
    assert merge.buffers["max_parts"][0] == 2 * merge.buffers["sum_parts"][0] == 2 * attend.buffers["max_parts"][1]
    compare(given, given)


@pytest.mark.proof
def test_rows_that_do_not_count_are_not_read():
    far = normal(1, 40, 128, seed=2)
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(
            normal(1, 8, 128),
            normal(1, 40, 128, seed=1),
            ints(30),
            far,
            ints(3, -1, 39, 20, -1)[None],
            ints(25),
            window=9,
        )
    assert (reports[0].buffers["near"], reports[0].buffers["far"]) == ((9 * 256, 0), (2 * 256, 0))


def problem(
    tokens: int = 40, heads: int = 64, keys: int = 640, dim: int = 512, dtype: torch.dtype = torch.bfloat16,
    format: str = "none",
) -> Problem:  # fmt: skip
    return Problem(
        dtype, torch.device("cpu"), tokens, heads, dim, tokens, 128, 128, keys - 128, keys - 128, True, False, False,
        True, 1.0, True, format=format, rope_dim=0 if format == "none" else 64,
    )  # fmt: skip


DTYPES = (torch.bfloat16, torch.float32)


def test_every_cut_has_all_heads_and_fits_in_threadgroup_memory():
    for dim, dtype, heads in itertools.product(sparse.DIMS, DTYPES, (1, 8, 9, 17, 40, 64, 65, 72, 128, 200)):
        p = problem(heads=heads, dim=dim, dtype=dtype)
        for most in (8, 16, 20, 32, 128):
            found = list(metal_plan.cuts(p, 40, most))
            assert found
            for cut in found:
                assert (cut.groups - 1) * cut.heads < heads <= cut.groups * cut.heads and cut.heads <= most
                assert cut.keys % 8 == cut.heads % 8 == 0 and cut.keys > 0 and dim % cut.slice == 0
                assert 0 < cut.simdgroups(dim) <= 16
                assert 0 <= cut.whole <= p.tokens and (cut.splits == 1) == (cut.whole == p.tokens)
                size = metal_plan.threadgroup_bytes(dim, dtype.itemsize, cut.heads, cut.slice, cut.keys)
                assert size <= MEMORY


@pytest.mark.proof
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", sparse.DIMS)
def test_the_host_knows_how_much_memory_a_threadgroup_takes(dim: int, dtype: torch.dtype, heads: int):
    heads = min(heads, metal_plan.most_heads(dim, dtype.itemsize))
    keys = metal_plan.keys_of(dim, dtype.itemsize, heads)
    columns = metal_plan.slice_of(dim, heads, dtype.itemsize)
    text = library.source(
        "sparse_fmha_with_swa",
        dict(
            TYPE=dtype, DIM=dim, HEADS=heads, SLICE=columns, KEYS=keys, WIDTH=4, LISTED=1,
            NEAR_PAGED=0, FAR_PAGED=0, FORMAT=0, ROPE=0, DIVIDED=0,
        ),
    )  # fmt: skip
    size = metal.compile_shader(text).sparse_rows.static_thread_group_memory_length
    assert size == metal_plan.threadgroup_bytes(dim, dtype.itemsize, heads, columns, keys)


def test_tokens_that_fill_the_cores_have_a_threadgroup_each_and_fewer_are_spread():
    def cut(**sizes: Any) -> tuple[int, int, int]:
        found = metal_plan.plan(problem(**sizes), cores=40)
        return found.groups, found.heads, found.splits

    assert [cut(tokens=n) for n in (32, 40, 64, 128, 4096)] == [(1, 64, 1)] * 5
    assert [cut(tokens=n) for n in (1, 8, 16, 48)] == [(3, 24, 5), (1, 64, 4), (1, 64, 2), (1, 64, 2)]
    assert metal_plan.plan(problem(tokens=48), cores=40).whole == 40
    assert [cut(heads=n)[:2] for n in (1, 8, 9, 20, 72, 128)] == [(1, 8), (1, 8), (1, 16), (1, 24), (2, 40), (2, 64)]
    assert [cut(heads=128, dim=n)[:2] for n in (128, 256)] == [(1, 128), (1, 128)]
    assert cut(dtype=torch.float32)[:2] == (2, 32)
    assert cut(tokens=1, keys=100)[2] == 1


def test_keys_of_tokens_that_fill_the_cores_are_read_once_and_of_the_others_little_is_read_again():
    """Modelled bytes to the least, 64 heads of 640 keys: what is over 1.3 has less than three quarters of 40 cores."""
    found = {}
    for tokens in range(1, 400):
        p = problem(tokens=tokens)
        least = tokens * (p.keys + 2 * p.heads) * p.dim * p.dtype.itemsize
        found[tokens] = metal_plan.loads(p, metal_plan.plan(p, cores=40)) / least
    assert max(ratio for tokens, ratio in found.items() if tokens > 28) < 1.15
    assert max(ratio for tokens, ratio in found.items() if 6 <= tokens <= 28) < 2.2
    assert found[1] < 3.9


@pytest.mark.parametrize(("tokens", "longer"), [(1, 11), (4, 7), (8, 3.5), (16, 1.9), (28, 1.2)])
def test_least_bytes_of_few_tokens_would_take_much_longer(tokens: int, longer: float):
    """No cut of 64 heads and 640 keys within 1.3 of the least bytes has a time near that of the plan, modelled."""
    p = problem(tokens=tokens)
    least = tokens * (p.keys + 2 * p.heads) * p.dim * p.dtype.itemsize
    frugal = [cut for cut in metal_plan.cuts(p, 40, 128) if metal_plan.loads(p, cut) <= 1.3 * least]
    assert frugal
    planned = metal_plan.cycles(p, metal_plan.plan(p, cores=40), 40)
    assert min(metal_plan.cycles(p, cut, 40) for cut in frugal) >= longer * planned


def test_a_pipeline_that_runs_fewer_simdgroups_gets_fewer_heads():
    p = problem()
    assert [metal_plan.plan(p, 40, most).heads for most in (128, 32, 16, 8)] == [64, 32, 16, 8]


def test_a_simulated_gpu_is_planned_for_as_one_of_40_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._C, "_mps_get_core_count", lambda: 10, raising=False)
    assert cores.cores_of(Target("metal", simulated=True)) == 40
    assert cores.cores_of(Target("metal")) == 10


# Up to 64 heads of 512 columns and 128 of 256, whose simdgroups have 256 columns; some heads are not there.
WIDE = [
    pytest.param(60, 512, 0, torch.bfloat16, False),
    pytest.param(64, 512, 1, torch.float16, True, marks=pytest.mark.proof),
    pytest.param(64, 512, 2, torch.bfloat16, False, marks=pytest.mark.proof),
    pytest.param(64, 512, 3, torch.bfloat16, True, marks=pytest.mark.proof),
    pytest.param(45, 512, 0, torch.float16, True, marks=pytest.mark.proof),
    pytest.param(121, 256, 0, torch.bfloat16, True, marks=pytest.mark.proof),
    pytest.param(100, 256, 1, torch.float16, False, marks=pytest.mark.proof),
    pytest.param(123, 128, 0, torch.bfloat16, False, marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("heads", "dim", "fmt", "dtype", "paged"), WIDE)
def test_many_heads_share_a_threadgroup(
    heads: int, dim: int, fmt: int, dtype: torch.dtype, paged: bool, monkeypatch: pytest.MonkeyPatch
):
    """One core, for which a token is never spread: parity's cases have too few tokens for these cuts on 40 cores."""
    monkeypatch.setattr(sparse, "cores_of", lambda target: 1)
    features = ("compressed", "topk", "compressed_len", "request_ids")
    features += ("swa_paged", "compressed_paged", "unnormalized") if paged else ("sink",)
    dims = dict(Tq=2, Hq=heads, R=2, S=20, C=16, K=9, D=dim, window=13, Ps=4, fmt=fmt, rope=64, gs=int(fmt == 2))
    args, kwargs = cases.make(dims, dtype, features, torch.Generator().manual_seed(3))
    names = (
        "q swa_kv swa_end compressed_kv topk_indices compressed_len request_ids sink swa_block_table"
        " compressed_block_table global_scale"
    )
    given = dict(zip(names.split(), args, strict=True)) | kwargs
    with library_of(monkeypatch) as built:
        compare(given, given)
    assert [(b["HEADS"], b["SLICE"]) for b in built] == [(-(-heads // 8) * 8, 256 if heads * dim > 1 << 14 else 128)]


@contextlib.contextmanager
def library_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the kernels that are built inside are built with."""
    built: list[dict[str, Any]] = []
    load = library.load

    def record(source: str, target: Target, **definitions: Any) -> Any:
        built.append(definitions)
        return load(source, target, **definitions)

    monkeypatch.setattr(sparse.library, "load", record)
    yield built
