"""csrc/cpu is an option: which calls it takes, what happens where it is not built, and what it refuses."""

from __future__ import annotations

import importlib
import math
from collections import Counter

import pytest
import torch

from torch_attnkit import cpu, digest, parity
from torch_attnkit.core import dispatch
from torch_attnkit.core.support import support
from torch_attnkit.cpu import blocks
from torch_attnkit.formats import fp8

ops = torch.ops.attnkit
KERNELS = {
    "fp4_moe": "Experts",
    "gated_rmsnorm": "Norm",
    "route_hash": "HashRouter",
    "route_softmax": "SoftmaxRouter",
    "route_sqrt_softplus": "SqrtSoftplusRouter",
    "sdpa_decode": "Decode",
    "sparse_fmha_with_swa": "Sparse",
}
BLOCKS = ("flash_attention", "flash_attention_paged", "flash_attention_varlen", "sdpa_decode_paged", "sdpa_multi")
built = pytest.mark.skipif(cpu.kernels is None, reason="csrc/cpu is not built")


@pytest.fixture
def forget():
    """Plans hold what was found when they were made."""

    def clear():
        for name in (*KERNELS, *BLOCKS):
            dispatch._PLANS[name].clear()

    clear()
    yield
    clear()


class Counted:
    """The kernels, and how many plans and calls asked for each."""

    def __init__(self, real):
        self.real, self.asked = real, Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self.real, name)


@pytest.fixture
def counted(monkeypatch, forget):
    kernels = Counted(cpu.kernels)
    monkeypatch.setattr(cpu, "kernels", kernels)
    return kernels.asked


def experts(tokens=2, n=64, m=32, count=4, k=2, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    w13, s13 = ops.mxfp4_quantize(torch.randn(count, 2 * m, n, generator=gen))
    w2, s2 = ops.mxfp4_quantize(torch.randn(count, n, m, generator=gen))
    indices = torch.rand(tokens, count, generator=gen).argsort(1)[:, :k]
    x = torch.randn(tokens, n, generator=gen).to(dtype)
    return [x, torch.rand(tokens, k, generator=gen), indices, w13, s13, w2, s2]


def sparse(chosen, end=(8, 3)):
    """Two tokens of two requests: a window of 8 keys, and of 4 entries those that are chosen."""
    gen = torch.Generator().manual_seed(0)
    q, near, far = (torch.randn(*shape, generator=gen) for shape in ((2, 4, 128), (2, 8, 128), (2, 4, 128)))
    return q, near, torch.tensor(end, dtype=torch.int32), far, torch.tensor(chosen, dtype=torch.int32)


def calls():
    """A small call of each op, by its name."""
    logits, x = torch.randn(2, 8), torch.randn(2, 4, 16)
    cache = torch.randn(2, 2, 8, 16)
    return {
        "fp4_moe": lambda: ops.fp4_moe(*experts(), format="mxfp4"),
        "gated_rmsnorm": lambda: ops.gated_rmsnorm(x, x, torch.ones(16)),
        "route_hash": lambda: ops.route_hash(logits, torch.tensor([1, 0]), torch.tensor([[0, 1], [2, 3]])),
        "route_softmax": lambda: ops.route_softmax(logits, topk=2),
        "route_sqrt_softplus": lambda: ops.route_sqrt_softplus(logits, topk=2),
        "sdpa_decode": lambda: ops.sdpa_decode(x, cache, cache, torch.tensor([8, 3], dtype=torch.int32)),
        "sparse_fmha_with_swa": lambda: ops.sparse_fmha_with_swa(*sparse([[2, 0], [-1, 1]])),
    }


@built
@pytest.mark.parametrize("name", KERNELS)
def test_small_calls_are_the_kernels(name, counted):
    calls()[name]()
    assert counted[KERNELS[name]] > 0


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("name", [*KERNELS, *BLOCKS])
def test_without_them_the_same_cases_hold(name, part, monkeypatch, forget):
    monkeypatch.setattr(cpu, "kernels", None)
    op, index, _, arch = next(row for row in support("cpu") if row[0].name == name)
    dtypes = ("f32",) if name not in BLOCKS else ("f32", "bf16")
    every = [case for case in parity.cases(op, index, arch) if case.dtype in dtypes]
    for case in every[part :: 10 * max(1, len(every) // 60)]:
        parity.run(case)


def test_a_build_that_is_not_there_is_no_fault_and_one_that_does_not_load_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def broken(name):
        raise ImportError("undefined symbol: x", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert cpu._load() is None
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(RuntimeWarning, match=r"rows of the CPU are PyTorch's alone: undefined symbol: x"):
        assert cpu._load() is None


def refused():
    """(op, a small call that it refuses, the words)."""
    nan, inf = torch.zeros(1, 4), torch.zeros(1, 4)
    nan[0, 2], inf[0, 1] = math.nan, math.inf
    table = torch.tensor([[0, 1]])
    q, cache = torch.zeros(1, 2, 16), torch.zeros(1, 1, 4, 16)
    far, scale = experts(), torch.ones(4)
    far[2] = far[2] + 3
    w13, s13 = ops.nvfp4_quantize(torch.ones(4, 64, 64))
    w2, s2 = ops.nvfp4_quantize(torch.ones(4, 64, 32))
    nvfp4 = [*experts()[:3], w13, s13, w2, s2]
    scale[3] = -1
    return (
        ("route_softmax", lambda: ops.route_softmax(nan, topk=1), "logits holds nan"),
        ("route_softmax", lambda: ops.route_softmax(inf, topk=1), "logits holds inf"),
        ("route_sqrt_softplus", lambda: ops.route_sqrt_softplus(inf, topk=1), "logits holds inf"),
        ("route_sqrt_softplus", lambda: ops.route_sqrt_softplus(inf.clamp(max=1), nan[0], topk=1), "bias holds nan"),
        ("route_hash", lambda: ops.route_hash(torch.zeros(1, 4), torch.tensor([1]), table), r"token_ids\[0\] is 1"),
        ("route_hash", lambda: ops.route_hash(torch.zeros(1, 4), torch.tensor([-1]), table), r"token_ids\[0\] is -1"),
        ("route_hash", lambda: ops.route_hash(torch.zeros(1, 1), torch.tensor([0]), table), r"tid2eid.* is 1"),
        ("sdpa_decode", lambda: ops.sdpa_decode(q, cache, cache, torch.tensor([5], dtype=torch.int32)), "kv_len"),
        ("sparse_fmha_with_swa", lambda: ops.sparse_fmha_with_swa(*sparse([[0, 1], [3, 3]])), "more than once"),
        ("sparse_fmha_with_swa", lambda: ops.sparse_fmha_with_swa(*sparse([[0, 1], [3, 4]])), "topk_indices"),
        ("sparse_fmha_with_swa", lambda: ops.sparse_fmha_with_swa(*sparse([[0, 1], [3, 2]], (9, 1))), "swa_end"),
        ("fp4_moe", lambda: ops.fp4_moe(*far, format="mxfp4"), "indices"),
        ("fp4_moe", lambda: ops.fp4_moe(*nvfp4, w2_global=scale), r"w2_global\[3\] is -1"),
    )


@pytest.mark.parametrize("at", range(13))
def test_what_they_do_not_take_is_refused_in_the_words_of_the_definition(at):
    name, call, message = refused()[at]
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        call()


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_in_several_threads_give_the_same_bits(dtype):
    """Enough weights for three threads, which begin and end inside of experts."""
    arguments = experts(tokens=3, n=1024, m=512, count=4, k=2, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(ops.fp4_moe(*arguments, format="mxfp4"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@built
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_the_gated_unit_is_rounded_as_the_dtype_rounds(dtype, bits):
    """One number goes in, as up beside a gate whose silu is known; one comes out: the rounding of the two's product."""
    gen = torch.Generator().manual_seed(bits)
    x = torch.randn(64, 32, generator=gen) * torch.exp2(torch.randint(-20, 6, (64, 1), generator=gen))
    x = x.to(dtype)
    code = torch.zeros(1, 64, 16, dtype=torch.uint8)
    code[0, :32, 0] = 2  # gate: the first number, times 1
    for row in range(32):
        code[0, 32 + row, row // 2] = 2 << 4 * (row % 2)  # up: number after number
    down = torch.zeros(1, 32, 16, dtype=torch.uint8)
    for row in range(32):
        down[0, row, row // 2] = 2 << 4 * (row % 2)
    ones = torch.full((1, 64, 1), 127, dtype=torch.uint8)
    weight, first = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    matrices = code, ones, down, ones[:, :32]
    got = torch.cat([ops.fp4_moe(row[None], weight, first, *matrices, format="mxfp4") for row in x])
    gate = x[:, :1].double()
    want = (gate / (1 + (-gate).exp()) * x.double()).to(dtype)
    off = (got.double() - want.double()).abs()
    least = 2.0**-14 if dtype == torch.float16 else 1e-38  # below it steps get no smaller
    step = torch.exp2(want.double().abs().clamp(min=least).log2().floor() - bits + 1)
    assert bool((off <= step).all()) and float((off > 0).double().mean()) < 0.01  # a tie that float32 just misses


def attention(dtype, n=150, tokens=1):
    """A call of each attention op on the same keys, with what torch gives for it."""
    gen = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, *s, generator=gen).to(dtype) for s in ((tokens, 8, 64), (n, 2, 64), (n, 2, 48)))
    length, tq, tk = (torch.tensor(x, dtype=torch.int32) for x in ([n], [0, tokens], [0, n]))
    kc, vc = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    order = torch.randperm(n, generator=gen)
    kp, vp, table = k[0, order, None], v[0, order, None], order.argsort().to(torch.int32)[None]
    calls = {
        "sdpa_multi": lambda: ops.sdpa_multi(q, kc, vc, length),
        "flash_attention": lambda: ops.flash_attention(q, k, v, causal=True)[:2],
        "flash_attention_varlen": lambda: ops.flash_attention_varlen(q[0], k[0], v[0], tq, tk, causal=True)[:2],
        "flash_attention_paged": lambda: ops.flash_attention_paged(q[0], kp, vp, tq, table, length),
    }
    if tokens == 1:
        calls |= {
            "sdpa_decode": lambda: ops.sdpa_decode(q[:, 0], kc, vc, length),
            "sdpa_decode_paged": lambda: ops.sdpa_decode_paged(q[:, 0], kp, vp, table, length),
        }
    return calls


class Taken(blocks.Blocks):
    """Whether the kernel took each call."""

    calls: list[bool] = []

    def __call__(self, *given):
        self.calls.append(super().__call__(*given))
        return self.calls[-1]


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_one_pass_and_one_result(dtype, tokens, monkeypatch, forget):
    """Every attention op, in every dtype, is that kernel, which gathers no pages and copies nothing to float32. From
    the same keys follows one result, to the bit."""
    if cpu.kernels is None or not cpu.kernels.blocks_run_here:
        pytest.skip("csrc/cpu/blocks.cpp is not built, or this processor has no AVX-512")
    monkeypatch.setattr(blocks, "Blocks", Taken)
    monkeypatch.setattr(Taken, "calls", [])
    calls = attention(dtype, 2100 if tokens == 1 else 150, tokens)
    found = {name: call() for name, call in calls.items()}
    assert Taken.calls == [True] * len(calls)
    first = next(iter(found.values()))
    for name, results in found.items():
        assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(first, results, strict=True)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_several_threads_is_the_same(dtype):
    """Enough of it for three threads."""
    call = attention(dtype, 300, 300)["flash_attention_paged"]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(call())
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


@built
def test_the_evidence_of_these_rows_depends_on_the_sources():
    for op, _, row, arch in support("cpu"):
        reached = "torch_attnkit.cpu" in digest.reach(*op.entries(row), arch=arch)
        assert reached == (op.name in KERNELS or op.name in BLOCKS), op.name
    assert digest.of_cpu() != digest.of()


@built
def test_scale_bytes_at_the_ends_are_numbers():
    """E8M0: 0 is 2^-127, 255 is NaN, also times nothing."""
    x, weights, _, w13, s13, w2, s2 = experts(tokens=1, k=1, count=2)
    s13[0], s2[1, 0, 0] = 0, 255
    tiny = ops.fp4_moe(x, weights, torch.zeros(1, 1, dtype=torch.int32), w13, s13, w2, s2, format="mxfp4")
    assert bool(tiny.isfinite().all()) and float(fp8.ue8m0_decode(s13[0, 0, :1])) == 2.0**-127
    nan = ops.fp4_moe(0 * x, weights, torch.ones(1, 1, dtype=torch.int32), w13, s13, w2, s2, format="mxfp4")
    assert bool(nan[0, 0].isnan()) and not bool(nan[0, 1:].isnan().any())
