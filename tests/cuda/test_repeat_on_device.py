"""Calls that C++ repeats on a GPU give what Python's give, to the bit: every op's cases, graphs, streams, threads."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core import dispatch, native
from torch_attnkit.core.target import target_of

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with compute capability 9.0 or 10.x"),
    pytest.mark.skipif(native.extension is None, reason=f"eager calls: {native.word}"),
]
LAYOUTS = parity.LAYOUTS
ROWS = [(op, i) for op in dispatch.OPS.values() for i, row in enumerate(op.kernels) if {"sm90", "sm100"} & {*row.archs}]
CASES = 6  # of each row; --proof takes all


def called(op, args, kwargs, layout="contiguous"):
    """Everything that a call on copies of ``args`` writes and returns."""
    moved = tuple(parity.embed(a, "cuda", layout) if isinstance(a, torch.Tensor) else a for a in args)
    out = getattr(torch.ops.attnkit, op.name)(*moved, **kwargs)
    return [*parity.mutated(op, moved), *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]


def poisoned(like):
    """Leaves garbage where the next outputs are likely to be allocated."""
    made = [torch.full((t.nbytes,), 0x5A, dtype=torch.uint8, device="cuda") for t in like for _ in range(2)]
    del made


def same(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and g.stride() == w.stride()
        g, w = (t.contiguous().view(torch.uint8) if t.dim() else t.view(1).view(torch.uint8) for t in (g, w))
        assert torch.equal(g, w)


def repeated(op):
    return native.extension.repeated(f"attnkit::{op.name}", "CUDA")


@pytest.mark.seconds(1200)
@pytest.mark.parametrize(("op", "index"), ROWS, ids=[f"{op.name}-{i}" for op, i in ROWS])
def test_every_case_is_python_s_to_the_bit(op, index, request):
    arch = target_of(torch.device("cuda", 0)).arch
    if arch not in op.kernels[index].archs:
        pytest.skip(f"not a row of {arch}")
    found = parity.cases(op, index, arch, covering=True)
    step = 1 if request.config.getoption("--proof") else max(1, len(found) // CASES)
    hits = asked = 0
    why = set()
    for number, case in enumerate(found[::step]):
        args, kwargs = parity.arguments(case)
        if op.kernels[index].refusal(parity.bound(op, args, kwargs)):
            continue
        layout = LAYOUTS[number % len(LAYOUTS)]
        with native.off():
            want = called(op, args, kwargs, layout)
        dispatch.UNREPEATED.clear()
        before = repeated(op)
        for mode in (contextlib.nullcontext, contextlib.nullcontext, torch.inference_mode, contextlib.nullcontext):
            with mode():
                poisoned(want)
                same(called(op, args, kwargs, layout), want)
        asked += 1
        hits += repeated(op) > before
        why |= set(dispatch.UNREPEATED.values())
    print(f"{op.name} {index}: {hits} of {asked} cases repeated by C++; others: {why or 'none'}")
    assert hits == asked or why


def decode_args(batch, keys, seed=0, heads=32, kv_heads=8, dim=128):
    gen = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=gen, device="cuda").bfloat16()
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return normal(batch, heads, dim), *(normal(batch, kv_heads, keys, dim) for _ in range(2)), lengths


decode = torch.ops.attnkit.sdpa_decode
SHAPES = pytest.mark.parametrize("shape", [(1, 1024), (3, 100), (16, 2048)], ids=str)


def warm(*args, **kwargs):
    with native.off():
        want = decode(*args, **kwargs)
    for _ in range(3):
        same(decode(*args, **kwargs), want)
    return want


@SHAPES
def test_captured_calls(shape):
    args, others = decode_args(*shape), decode_args(*shape, seed=1)
    want, other = warm(*args), warm(*others)
    q, k, v, n = (t.clone() for t in args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(q, k, v, n)
        again = decode(q, k, v, n)
    graph.replay()
    same(got, want), same(again, want)
    for t, o in zip((q, k, v, n), others, strict=True):
        t.copy_(o)
    graph.replay()
    same(got, other), same(again, other)
    same(decode(*args), want)


def test_captured_calls_without_a_workspace():
    x = torch.randn(7, 4096, device="cuda").bfloat16()
    quantize = torch.ops.attnkit.nvfp4_quantize
    with native.off():
        want = quantize(x)
    for _ in range(3):
        same(quantize(x), want)
    before = native.extension.repeated("attnkit::nvfp4_quantize", "CUDA")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(x)
    assert native.extension.repeated("attnkit::nvfp4_quantize", "CUDA") == before + 1
    graph.replay()
    same(got, want)


@SHAPES
def test_other_streams(shape):
    args = decode_args(*shape)
    want = warm(*args)
    torch.cuda.synchronize()
    for _ in range(2):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                poisoned(want)
                got = decode(*args)
        stream.synchronize()
        same(got, want)


@SHAPES
def test_four_threads(shape):
    """Each on a stream of its own, with arguments of its own: the plan's argument records are shared."""
    sets = [decode_args(*shape, seed=s) for s in range(4)]
    wanted = [warm(*args) for args in sets]
    torch.cuda.synchronize()
    wrong, start = [], threading.Barrier(4)

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(300):
                    same(decode(*sets[number]), wanted[number])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_decided_at_the_launch_belongs_to_the_signature():
    """One tensor as both caches, caches that are halves of one buffer, and pointers that are not aligned."""
    q, k, v, n = decode_args(2, 300, heads=16, kv_heads=1, dim=512)
    both = torch.cat([k, v], -1)
    halves = both[..., :512], both[..., 512:]
    odd = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    calls = [(q, k, v, n), (q, k, k, n), (q, v, v, n), (q, *halves, n), (odd, k, v, n), (odd, k, k, n)]
    with native.off():
        wanted = [decode(*args) for args in calls]
    for _ in range(4):
        for args, want in zip(calls, wanted, strict=True):
            poisoned(want)
            same(decode(*args), want)


def test_memory_is_given_back():
    args = decode_args(4, 512)
    warm(*args)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        decode(*args)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_gradients_modes_and_compile():
    q, k, v, n = decode_args(1, 1024)
    want = warm(q, k, v, n)
    out, _ = decode(q.clone().requires_grad_(), k, v, n)
    with pytest.raises(NotImplementedError, match="sdpa_decode has no backward"):
        out.sum().backward()
    same(torch.compile(lambda *a: decode(*a), fullgraph=True)(q, k, v, n), want)
    stacked = torch.vmap(lambda x: decode(x, k, v, n)[0])(torch.stack([q, q]))
    same([stacked[0], stacked[1]], [want[0]] * 2)
    with pytest.raises(ValueError, match="sdpa_decode: k_cache must be"):
        decode(q, k[0], v, n)
    cache, kv = torch.zeros(8, 64, device="cuda"), torch.randn(2, 64, device="cuda")
    slot = torch.tensor([3, 5], device="cuda")
    for repetition in range(5):
        version = cache._version
        torch.ops.attnkit.kv_cache_write(kv, cache, slot)
        assert cache._version == version + 1, repetition
        assert torch.equal(cache[[3, 5]], kv)
        cache.zero_()
