"""Blocks of queries over pages on Metal: what prefill over pages does more than over packed keys, and never does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.metal_calls import METAL, compare, offsets, run
from torch_attnkit.core import dispatch
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity import poison, reference_of
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
NAME = "flash_attention_paged"


def made(page: int, len_q: tuple[int, ...], kv_len: tuple[int, ...], dim: int = 64) -> tuple[tuple[Any, ...], ...]:
    """Arguments of flash_attention_paged and of flash_attention_varlen for the same attention, eight heads on two.

    Pages lie in random order, keys and values as halves of one tensor (Np, Hkv, Ps, 2 D), as vLLM has them; what nobody
    may look at is NaN.
    """
    gen = torch.Generator().manual_seed(page)
    used = [-(-n // page) for n in kv_len]
    order, starts = torch.randperm(sum(used) + 1, generator=gen).int(), offsets(tuple(used))
    table = torch.full((len(kv_len), max(used) + 1), 2**31 - 1, dtype=torch.int32)
    both = torch.full((len(order), 2, page, 2 * dim), torch.nan, dtype=torch.float16)
    keys = torch.randn(sum(kv_len), 2, 2 * dim, generator=gen).half()  # (Tk, Hkv, 2 D)
    for b, own in enumerate(keys.split(list(kv_len))):
        table[b, : used[b]] = order[starts[b] : starts[b + 1]]
        at = torch.arange(kv_len[b])
        both[table[b, at // page].long(), :, at % page] = own
    q = torch.randn(sum(len_q) + 2, 8, dim, generator=gen).half()
    lengths = torch.tensor(kv_len, dtype=torch.int32)
    paged = (q, *both.transpose(1, 2).split(dim, -1), offsets(len_q), table, lengths)
    return paged, (q, *keys.split(dim, -1), offsets(len_q), offsets(kv_len))


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", [1, 5, 16, 24, 64, 100, 256])
def test_pages_of_any_size_where_they_lie(page: int):
    """A chunk, a token, a sequence without queries, one shorter than its block, and drafts; then without hints."""
    args, _ = made(page, (40, 1, 0, 9, 3), (300, 131, 20, 4, 257))
    compare(NAME, args, max_seqlen_q=40, max_seqlen_k=300)
    compare(NAME, args, window=70, sink_tokens=5, softcap=20.0, causal=False)


@pytest.mark.parametrize("offset", [1, 4])
def test_rows_that_no_vector_can_read(offset: int):
    """Pages whose rows are 65 elements apart, or begin one element in."""
    (q, k, v, *rest), _ = made(16, (9, 1), (70, 33))
    for at in (1, 2):
        buffer = torch.full((k.shape[0], 16, 2, 64 + offset), torch.nan, dtype=torch.float16)
        compare(NAME, (q, *(buffer[..., offset:].copy_(t) if n == at else t for n, t in ((1, k), (2, v))), *rest))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("len_q", "kv_len"), [((60, 40, 1), (60, 200, 90)), ((1, 1), (130, 70))])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_the_work_is_that_of_packed_keys(page: int, len_q: tuple[int, ...], kv_len: tuple[int, ...]):
    """The same bits, keys and products as over the same keys packed, for 5 % more bytes and integers at most.

    Every simdgroup reads the table for itself, an entry for each key of a block, and its lanes tell one another, which
    are two collectives for each vector that it copies.
    """
    (q, k, v, *rest), packed = made(page, len_q, kv_len)
    of_pages = (q, k.contiguous(), v.contiguous(), *rest)  # of halves of one tensor the counts would be one's
    hints = dict(causal=True, max_seqlen_q=max(len_q), max_seqlen_k=max(kv_len))
    packed = (q, *(t.contiguous() for t in packed[1:3]), *packed[3:])
    with metal.counting() as reports:
        got, want = run(NAME, of_pages, **hints), run("flash_attention_varlen", packed, **hints)
    assert all(torch.equal(g, w) for g, w in zip(got, want[:2], strict=True))
    pages, plain = reports
    for name in ("k", "v"):
        assert pages.buffers[name] == plain.buffers[name]
    for count in ("flops", "matrix_flops", "special", "barriers", "threadgroup_read", "threadgroup_written"):
        assert getattr(pages, count) == getattr(plain, count), count
    assert pages.device_bytes <= 1.05 * plain.device_bytes
    assert pages.integer <= 1.05 * plain.integer
    assert pages.collectives <= 1.5 * plain.collectives


def test_nothing_is_read_that_is_not_there():
    """Offsets, lengths and tables that no caller should pass: the simulator refuses every access out of bounds.

    Offsets only grow: sequences that overlap have rows that two threadgroups write.
    """
    (q, k, v, *indices), _ = made(16, (40, 1, 9), (300, 131, 64))
    wild = torch.tensor([-(2**31), -1, 0, 7, 1 << 20, 2**31 - 1], dtype=torch.int32)
    with metal.settings(mode="checked", strict=True):
        for seed in range(4):
            gen = torch.Generator().manual_seed(seed)
            for i, good in enumerate(indices):
                values = wild[torch.randint(len(wild), good.shape, generator=gen)]
                indices[i] = torch.where(torch.rand(good.shape, generator=gen) < 0.5, values, good)
            indices[0] = indices[0].sort().values
            run(NAME, (q, k, v, *indices))


def test_lengths_and_offsets_change_under_one_plan():
    (q, k, v, ends, table, lengths), _ = made(16, (40, 1, 9), (300, 131, 64))
    k, v, table = k.nan_to_num(), v.nan_to_num(), table.clamp(max=5)
    op = dispatch.OPS[NAME]
    rest = tuple(op.defaults.get(n) for n in op.argnames[6:])
    call = op.bind((q, k, v, ends, table, lengths, *rest))
    launch = dispatch.build(op, call, METAL)
    for offsets_now, now in (((0, 1, 2, 50), (300, 100, 60)), ((0, 0, 50, 50), (0, 131, 1))):
        args = (q, k, v, torch.tensor(offsets_now).int(), table, torch.tensor(now).int())
        outs = [poison(shape, dtype, "cpu") for shape, dtype in op.outputs(call)]
        launch(*args, *rest, *outs)
        refs = (reference_of(op, args, {}, double=d) for d in (False, True))
        for name, *three in zip(("out", "lse"), outs, *refs, strict=True):
            check(name, *three)
