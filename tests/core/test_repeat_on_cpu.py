"""Calls on the CPU that C++ repeats (csrc/dispatch calls csrc/cpu): the bits of Python's, and nothing else repeated."""

from __future__ import annotations

import contextvars
import gc
import math
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attnkit
from torch_attnkit import cpu, parity
from torch_attnkit.core import dispatch, native, simulate
from torch_attnkit.core.support import support

pytestmark = [
    pytest.mark.skipif(native.extension is None, reason=f"eager calls: {native.word}"),
    pytest.mark.skipif(cpu.kernels is None, reason="csrc/cpu is not built"),
]
ops = torch.ops.attnkit
READY = (
    "gated_rmsnorm", "route_hash", "route_softmax", "route_sqrt_softplus", "sdpa_decode", "sparse_fmha_with_swa",
)  # fmt: skip


@pytest.fixture(autouse=True)
def forget():
    for name in READY:
        dispatch._PLANS[name].clear()


def repeated(name="route_softmax"):
    return native.extension.repeated(f"attnkit::{name}", "CPU")


def known(name="route_softmax"):
    return native.extension.size(f"attnkit::{name}", "CPU")


def listed(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


def same(got, want):
    for g, w in zip(listed(got), listed(want), strict=True):
        assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype)
        assert torch.equal(g.reshape(-1).view(torch.uint8), w.reshape(-1).view(torch.uint8))
    return True


def in_python(name, *args, **kwargs):
    with native.off():
        return getattr(ops, name)(*args, **kwargs)


def ready(name, *args, **kwargs):
    """What a call gives whose signature C++ knows from now on."""
    before = repeated(name)
    for _ in range(3):
        out = getattr(ops, name)(*args, **kwargs)
    assert repeated(name) == before + 1
    return out


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", READY)
def test_the_cases_of_a_row_give_the_same_bits(name, part):
    op, index, _, arch = next(row for row in support("cpu") if row[0].name == name)
    cases = [case for case in parity.cases(op, index, arch) if case.dtype == "f32"]
    before = repeated(name)
    for case in cases[part :: 3 * max(1, len(cases) // 90)]:
        args, kwargs = parity.arguments(case)
        want = in_python(name, *args, **kwargs)
        for _ in range(3):
            assert same(getattr(ops, name)(*args, **kwargs), want), case
    assert repeated(name) > before


def test_the_second_call_is_told_and_the_third_repeated():
    before = repeated()
    for step in range(6):
        x = torch.randn(2, 8)
        assert same(ops.route_softmax(x, topk=2), in_python("route_softmax", x, topk=2))
        assert (known(), repeated() - before) == (min(step, 1), max(0, step - 1))
    assert torch_attnkit.core.dispatch.plan_of("route_softmax", x, topk=2).where == "cpu"


def test_nothing_is_taken_for_the_same_that_differs():
    x, wide = torch.randn(4, 8), torch.randn(4, 16)
    calls = [
        (x, dict(topk=2)), (x, dict(topk=3)), (x.view(2, 16), dict(topk=2)), (wide[:, :8], dict(topk=2)),
        (x, dict(topk=2, softmax_first=True)), (x, dict(topk=2, renormalize=True)), (x, dict(topk=2, route_scale=2.5)),
        (x.bfloat16(), dict(topk=2)), (x.double(), dict(topk=2)),
    ]  # fmt: skip
    before = repeated()
    for _ in range(4):
        for logits, kwargs in calls:
            assert same(ops.route_softmax(logits, **kwargs), in_python("route_softmax", logits, **kwargs))
    assert known() == len(calls) and repeated() == before + 2 * (len(calls) - 2), "float32 alone is C++'s"


def test_addresses_are_not_part_of_a_signature():
    """Where tensors begin, and whether two of them are one, as keys and values of latents are."""
    buffer, lengths = torch.randn(4096), torch.tensor([8, 3], dtype=torch.int32)

    def caches_at(*begins):
        return [buffer[b : b + 512].view(2, 2, 8, 16) for b in begins]

    q = torch.randn(2, 4, 16)
    ready("sdpa_decode", q, *caches_at(0, 1024), lengths)
    before = repeated("sdpa_decode")
    pairs = [(0, 0), (3, 1025), (512, 512), (1024, 0), (1030, 1031)]
    for pair in pairs:
        caches = caches_at(*pair)
        assert same(ops.sdpa_decode(q, *caches, lengths), in_python("sdpa_decode", q, *caches, lengths))
    assert repeated("sdpa_decode") == before + len(pairs) and known("sdpa_decode") == 1


def test_what_a_kernel_does_not_take_is_python_s_in_its_words():
    x = torch.zeros(1, 4)
    ready("route_softmax", x, topk=2)
    ready("route_hash", x, torch.tensor([1]), torch.tensor([[0, 1], [2, 3]]))
    q, cache, length = torch.randn(1, 2, 16), torch.randn(1, 1, 4, 16), torch.tensor([4], dtype=torch.int32)
    ready("sdpa_decode", q, cache, cache, length)
    counts = [repeated(name) for name in READY]
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"route_softmax: logits holds {value}"):
            ops.route_softmax(torch.full_like(x, value), topk=2)
    with pytest.raises(ValueError, match=r"route_hash: token_ids\[0\] is 2"):
        ops.route_hash(x, torch.tensor([2]), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match=r"route_hash: tid2eid.* is 4"):
        ops.route_hash(x, torch.tensor([1]), torch.tensor([[0, 1], [2, 4]]))
    with pytest.raises(ValueError, match=r"sdpa_decode: kv_len\[0\] is 5"):
        ops.sdpa_decode(q, cache, cache, torch.full_like(length, 5))
    out, lse = ops.sdpa_decode(q, cache, cache, torch.zeros_like(length))  # no keys: the definition's
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
    with pytest.raises(ValueError, match="route_softmax: topk must be"):
        ops.route_softmax(x, topk=5)
    with pytest.raises(TypeError, match="route_hash: tid2eid is None"):
        ops.route_hash(x, torch.tensor([1]), None)
    with pytest.raises(TypeError, match="route_softmax: logits is i64"):
        ops.route_softmax(x.long(), topk=2)
    assert [repeated(name) for name in READY] == counts
    assert same(ops.route_softmax(x, topk=2), in_python("route_softmax", x, topk=2)) and repeated() == counts[2] + 1


def test_indices_with_steps_between_them_are_python_s():
    x, table = torch.randn(3, 4), torch.tensor([[0, 1], [2, 3]])
    ids = torch.tensor([1, 9, 0, 9, 1, 9])[::2]
    before = repeated("route_hash")
    for _ in range(4):
        assert same(ops.route_hash(x, ids, table), in_python("route_hash", x, ids.contiguous(), table))
    assert repeated("route_hash") == before and known("route_hash") == 1


@pytest.mark.simulator
def test_a_simulated_arch_is_python_s_in_every_thread_and_context():
    pytest.importorskip("torch_attnkit.sim._metal")
    x = torch.randn(2, 8)
    want = ready("route_softmax", x, topk=2)
    before = repeated()

    def where():
        with torch_attnkit.record() as ran:
            ops.route_softmax(x, topk=2)
        return [pair for _, pair in ran.calls]

    with simulate("metal"):
        for _ in range(4):
            assert torch.equal(ops.route_softmax(x, topk=2)[1], want[1])
        assert where() == ["metal (simulated)"]
        kept = contextvars.copy_context()
        outside = []
        thread = threading.Thread(target=lambda: outside.append(ops.route_softmax(x, topk=2)))
        thread.start()
        thread.join()
        assert same(outside[0], want) and repeated() == before + 1, "another thread is not in the block"
    assert kept.run(where) == ["metal (simulated)"] and repeated() == before + 1, "what left the block still is"
    for _ in range(3):
        kept.run(ops.route_softmax, x, topk=2)
    assert repeated() == before + 1
    assert same(ops.route_softmax(x, topk=2), want) and repeated() == before + 2


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    names: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func._schema.name)
        return func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))


def test_what_lies_between_autograd_and_the_cpu_is_python_s():
    """Gradients, tangents, transforms, subclasses and negated views."""
    x = torch.randn(2, 8)
    want = ready("route_softmax", x, topk=2)
    weights, _ = ops.route_softmax(x.clone().requires_grad_(), topk=2)
    with pytest.raises(NotImplementedError, match="route_softmax has no backward, and a gradient of logits"):
        weights.sum().backward()
    before = repeated()
    with pytest.raises(NotImplementedError, match="logits has a tangent"):
        torch.func.jvp(lambda t: ops.route_softmax(t, topk=2)[0], (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="logits has a tangent"):
            ops.route_softmax(dual, topk=2)
    with pytest.raises(NotImplementedError, match="has no backward"):
        torch.func.grad(lambda t: ops.route_softmax(t, topk=2)[0].sum())(x)
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    with fake:
        assert all(isinstance(t, FakeTensor) for t in ops.route_softmax(fake.from_tensor(x), topk=2))
    meta = ops.route_softmax(x.to("meta"), topk=2)
    assert [t.device.type for t in meta] == ["meta", "meta"]
    assert repeated() == before
    # These come back as plain tensors below what they are.
    assert same(ops.route_softmax(Wrapped(x), topk=2), want) and Wrapped.names == ["attnkit::route_softmax"]
    assert same(ops.route_softmax(torch._neg_view(-x), topk=2), want)
    mapped = torch.vmap(lambda t: ops.route_softmax(t, topk=2))(torch.stack([x, x]))
    assert same([m[1] for m in mapped], want)
    with Seen() as mode:
        assert same(ops.route_softmax(x, topk=2), want)
    assert mode.names[0] == "attnkit::route_softmax"
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert same(ops.route_softmax(x, topk=2), want)


def test_gradients_of_a_norm_are_those_of_python():
    y, z, w = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    ready("gated_rmsnorm", y, z, w)

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (y, z, w)]
        out = ops.gated_rmsnorm(*leaves)
        assert out.requires_grad
        return torch.autograd.grad(out.square().sum(), leaves)

    with native.off():
        want = gradients()
    for _ in range(3):
        assert same(gradients(), want)


def test_inference_tensors():
    x = torch.randn(2, 8)
    parameter = torch.nn.Parameter(x)
    want = ready("route_softmax", x, topk=2)
    before = repeated()
    with torch.inference_mode():
        inside = ops.route_softmax(x.clone(), topk=2)
        assert all(t.is_inference() for t in inside) and same(inside, want)
    with torch.no_grad():
        found = ops.route_softmax(parameter, topk=2)
        assert same(found, want) and not any(t.requires_grad or t.is_inference() for t in found)
    assert repeated() == before + 2


def test_lazy_copies_stay_lazy():
    x = torch.randn(2, 8)
    want = ready("route_softmax", x, topk=2)
    lazy, before = torch._lazy_clone(x), repeated()
    assert same(ops.route_softmax(lazy, topk=2), want)
    assert torch._C._is_cow_tensor(lazy) and repeated() == before + 1


def test_python_runs_every_call_while_it_is_off_and_plans_are_cleared():
    x = torch.randn(2, 8)
    want = ready("route_softmax", x, topk=2)
    before = repeated()
    assert same(in_python("route_softmax", x, topk=2), want)
    with parity.guarded_outputs() as fences:
        ops.route_softmax(x, topk=2)
    assert len(fences) == 2 and repeated() == before
    dispatch._PLANS["route_softmax"].clear()
    assert known() == 0
    ready("route_softmax", x, topk=2)


def test_without_the_kernels_a_call_is_python_s(monkeypatch):
    x = torch.randn(2, 8)
    want = ready("route_softmax", x, topk=2)
    monkeypatch.setattr(cpu, "kernels", None)
    dispatch._PLANS["route_softmax"].clear()
    before = repeated()
    for _ in range(4):
        assert torch.equal(ops.route_softmax(x, topk=2)[1], want[1])
    assert repeated() == before and known() == 1
    dispatch._PLANS["route_softmax"].clear()


def test_outputs_are_new_and_nothing_is_kept_of_a_call():
    x = torch.randn(2, 8)
    first = ready("route_softmax", x, topk=2)
    copies = [t.clone() for t in first]
    ops.route_softmax(-x, topk=2)
    assert same(first, copies)

    def references(t):
        return torch._C._storage_Use_Count(t.untyped_storage()._cdata)

    held = references(x)
    for _ in range(20):
        out = ops.route_softmax(x, topk=2)
    assert len({t.untyped_storage()._cdata for t in (*out, *first, x)}) == 5
    gc.collect()
    assert references(x) == held and [references(t) for t in out] == 2 * [references(torch.ones(2))]


def test_threads_share_plans_that_others_clear():
    wrong, done = [], threading.Event()
    inputs = [torch.randn(16, 64) for _ in range(4)]
    wanted = [in_python("route_sqrt_softplus", x, topk=4) for x in inputs]

    def work(x, want):
        for _ in range(400):
            if not all(map(torch.equal, ops.route_sqrt_softplus(x, topk=4), want)):
                wrong.append(x)

    def disturb():
        while not done.is_set():
            dispatch._PLANS["route_sqrt_softplus"].clear()
            for n in range(2, 6):
                ops.route_sqrt_softplus(torch.ones(1, n), topk=1)

    before = repeated("route_sqrt_softplus")
    threads = [threading.Thread(target=work, args=given) for given in zip(inputs, wanted, strict=True)]
    other = threading.Thread(target=disturb)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not wrong and repeated("route_sqrt_softplus") > before
