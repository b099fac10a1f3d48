"""Sparse attention on Metal: how it is cut, wild indices, and what crosses the bus."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.sparse import metal as sparse
from torch_attnkit.mps import library
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
    for name, mine, low, high in zip(("out", "lse"), got, reference(**meant), reference(**wide), strict=False):
        check(name, mine, low, high)


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
def test_keys_of_all_heads_come_from_memory_once():
    """64 heads are two threadgroups, which follow one another: with a cache for one token's keys, memory is read once.
    What is counted is what docs/kernels/sparse.md says."""
    dims = dict(Tq=48, Hq=64, R=48, S=256, C=512, K=512, D=512, window=128, compressed=1, topk=1, sink=1)
    args, kwargs = cases.bench(dims, torch.bfloat16, torch.Generator().manual_seed(0))
    with torch_attnkit.simulate("metal"), metal.counting() as reports, metal.settings(cache=1 << 20):
        op(*args, **kwargs)
    (report,), least = reports, cases.bytes(dims, torch.bfloat16)
    assert report.memory_read + report.memory_written <= 1.3 * least
    assert report.device_bytes <= 1.9 * least


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


def test_every_size_that_a_row_accepts_fits_in_threadgroup_memory():
    for dim, itemsize, heads in itertools.product(sparse.DIMS, (2, 4), (1, 8, 17, 64, 128)):
        most = sparse.heads_of(dim, heads, 1 << 20)
        keys = sparse.keys_of(dim, itemsize, most)
        assert keys % 8 == most % 8 == 0 and keys > 0 and sparse.simdgroups(dim, most) <= 32
        assert sparse.threadgroup_bytes(dim, itemsize, most, keys) <= MEMORY


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", sparse.DIMS)
def test_the_host_knows_how_much_memory_a_threadgroup_takes(dim: int, dtype: torch.dtype):
    heads = sparse.heads_of(dim, 64, 1 << 20)
    keys = sparse.keys_of(dim, dtype.itemsize, heads)
    text = library.source(
        "sparse_fmha_with_swa",
        dict(
            TYPE=dtype, OUT_TYPE=dtype, DIM=dim, HEADS=heads, KEYS=keys, WIDTH=4, LISTED=1, NEAR_PAGED=0, FAR_PAGED=0,
            FORMAT=0, ROPE=0, DIVIDED=0,
        ),
    )  # fmt: skip
    kernel = metal.compile_shader(text).sparse_rows
    assert kernel.static_thread_group_memory_length == sparse.threadgroup_bytes(dim, dtype.itemsize, heads, keys)


def test_few_tokens_share_their_heads_and_then_their_keys():
    assert [sparse.heads_of(512, 64, tokens) for tokens in (1, 24, 47, 48, 4096)] == [16, 16, 16, 32, 32]
    assert [sparse.heads_of(512, heads, 4096) for heads in (1, 8, 9, 20, 64)] == [8, 8, 16, 24, 32]
    assert sparse.heads_of(128, 128, 4096) == 64
    assert [sparse.splits_of(640, groups) for groups in (4, 32, 96, 8192)] == [5, 3, 1, 1]
    assert sparse.splits_of(100, 1) == 1
