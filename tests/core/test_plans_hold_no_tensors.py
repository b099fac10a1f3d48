"""A plan outlives its call, 4096 of them an op: it holds no tensor of the call that it was made for, on any target."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from torch_attnkit import parity
from torch_attnkit.core import dispatch, simulate
from torch_attnkit.core.support import support
from torch_attnkit.cuda import compile
from torch_attnkit.mps import library
from torch_attnkit.parity.case import accepted

ARCHS = ("cpu", "metal", "sm90", "sm100")
ops = torch.ops.attnkit


class Kernels:
    """A Metal library in which every kernel is found and none runs."""

    def __getattr__(self, name):
        return types.SimpleNamespace(max_threads_per_threadgroup=1024)


@contextlib.contextmanager
def planning(arch, monkeypatch):
    """Inside, calls are planned for ``arch``, and nothing is compiled."""
    if arch == "cpu":
        yield
        return
    pytest.importorskip("torch_attnkit.sim._metal" if arch == "metal" else "torch_attnkit.sim._ptx")
    with monkeypatch.context() as patch, simulate(arch), compile.recording():
        patch.setattr(library, "_compile", lambda text, _: library.Library(Kernels(), library.slots(text)))
        yield


def two_cases(op, index, arch):
    """The first case of a row that it takes, and the last with all of its features."""
    cases = [c for c in parity.cases(op, index, arch) if not c.extra]
    full = max(len(c.features) for c in cases)
    plain = next(filter(accepted, cases))
    return plain, next(filter(accepted, (c for c in reversed(cases) if len(c.features) == full)), plain)


def call_of(op, case):
    with contextlib.nullcontext() if case.arch == "cpu" else parity.ShapesOnly():
        args, kwargs = parity.arguments(case)
    return [*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])]


def references(tensors):
    return [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in tensors]


def check_held(op, values, runs_on):
    """That a plan of these arguments holds none of their storages; it takes them out of ``values``."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    before = references(tensors)
    plan = dispatch.make_plan(op, tuple(values))
    if runs_on in ("cpu", "reference"):
        plan.launch(*values)
    assert plan.where == runs_on
    gc.collect(1)
    assert references(tensors) == before, "a plan holds a storage of its call"
    alive = [weakref.ref(t) for t in tensors]
    values.clear()
    tensors.clear()
    assert not [ref() for ref in alive if ref() is not None], "a plan holds a tensor of its call"
    return plan


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_of_a_row_holds_no_tensor_of_its_call(arch, monkeypatch):
    rows = support(arch)
    with planning(arch, monkeypatch):
        for op, index, _, _ in rows:
            for case in dict.fromkeys(two_cases(op, index, arch)):
                plan = check_held(op, call_of(op, case), "cpu" if arch == "cpu" else f"{arch} (simulated)")
                assert plan.launch is not None, case


def live():
    """The sizes of all tensors with memory that Python holds."""
    gc.collect()
    found = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor and not t.is_meta and t.untyped_storage().nbytes():
            found[t.untyped_storage()._cdata] = tuple(t.shape)
    return sorted(found.values())


def growing(n, dtype):
    """A call of each op with a cache of n keys, by its name."""
    gen = torch.Generator().manual_seed(n)
    q, cache = torch.randn(1, 4, 64, generator=gen).to(dtype), torch.randn(1, 2, n, 64, generator=gen).to(dtype)
    length, keys = torch.tensor([n], dtype=torch.int32), cache.transpose(1, 2)
    offsets, pages = torch.tensor([0, n], dtype=torch.int32), torch.arange(n, dtype=torch.int32)[None]
    one = torch.tensor([0, 1], dtype=torch.int32)
    return {
        "sdpa_decode": lambda: ops.sdpa_decode(q, cache, cache, length),
        "sdpa_decode_paged": lambda: ops.sdpa_decode_paged(q, keys[0, :, None], keys[0, :, None], pages, length),
        "sdpa_multi": lambda: ops.sdpa_multi(q[:, None], cache, cache, length),
        "flash_attention": lambda: ops.flash_attention(q[:, None], keys, keys, kv_len=length, causal=True),
        "flash_attention_varlen": lambda: ops.flash_attention_varlen(q, keys[0], keys[0], one, offsets, causal=True),
        "flash_attention_paged": lambda: ops.flash_attention_paged(
            q, keys[0, :, None], keys[0, :, None], one, pages, length
        ),
        "indexer_scores": lambda: ops.indexer_scores(q, cache[:, 0], q[:, :, 0].contiguous(), length),
        "indexer_topk": lambda: ops.indexer_topk(torch.rand(1, n, generator=gen), length, topk=4),
        "sparse_fmha_with_swa": lambda: ops.sparse_fmha_with_swa(q, keys[:, :8, 0], one[1:], keys[:, :, 0]),
    }


def test_growing_caches_leave_nothing_behind():
    """Of every length there is a plan, on the CPU; all of them together hold no byte."""
    names, dtypes = list(growing(16, torch.float32)), (torch.float32, torch.bfloat16)
    for name in names:
        dispatch._PLANS[name].clear()
        for dtype in dtypes:
            growing(16, dtype)[name]()  # tables, and room to work in, that are there once
    before = live()
    for n in range(17, 25):
        for name in names:
            for dtype in dtypes:
                growing(n, dtype)[name]()
    assert all(len(dispatch._PLANS[name]) >= 9 for name in names), "a plan for every length"
    assert live() == before


def most_bytes(step):
    """The most that allocations of the CPU came to at a time while a cache of keys, and one of values, grew by a token
    at each of 64 steps, counted by PyTorch's profiler."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 64, generator=gen).bfloat16()
    cache = torch.randn(1, 2, 1000, 64, generator=gen).bfloat16()
    step(q, cache, cache)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as ran:
        keys, values = cache, cache
        for _ in range(64):
            keys, values = (torch.cat([t, t[:, :, :1]], 2) for t in (keys, values))
            step(q, keys, values)
    now, most = 0, 0
    for event in ran.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 about its own profiler
def test_a_growing_cache_takes_no_more_memory_than_eager():
    def ours(q, k, v):
        return ops.sdpa_decode(q, k, v, torch.tensor([k.shape[2]], dtype=torch.int32))[0]

    def eager(q, k, v):
        return functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    assert 0 < most_bytes(ours) <= 1.2 * most_bytes(eager)
