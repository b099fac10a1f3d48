"""Calls that C++ repeats, without a GPU: its kernels are registered for CPU tensors under a namespace of the tests.

Behind them is a C function in the place of a compiled kernel, or what CuTeDSL compiled, in the simulator.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from torch_attnkit import batch_invariant, parity
from torch_attnkit.core import Kernel, Op, dispatch, into, native, simulate
from torch_attnkit.cuda import driver, repeat

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"eager calls: {native.word}")
SPACE = "attnkit_repeated"
TOY = Op(
    schema="toy(Tensor x, Tensor? y=None, *, float factor=2.0, str mode='plain', bool flag=False) -> Tensor out",
    dims={"x": "... N:f32", "y": "... N:f32", "out": "... N:f32"},
    kernels=(Kernel("sm90", "f32"),),
)
MOST = 6  # plans of TOY


@pytest.fixture(scope="module")
def library():
    """A namespace whose ops C++ runs on CPU tensors: all of ours, and TOY."""
    made = torch.library.Library(SPACE, "DEF")
    with pytest.MonkeyPatch.context() as patch:
        for op in [*dispatch.OPS.values(), into.form_of(dispatch.OPS["nvfp4_quantize"])]:
            made.define(op.schema)
            dispatch.register_native(op, SPACE, "CPU", dispatch._compile(op))
            native.quicken(SPACE, op.name)
        patch.setattr(dispatch, "_MAX_PLANS", MOST)
        made.define(TOY.schema)
        dispatch.register_native(TOY, SPACE, "CPU", dispatch._compile(TOY))
        native.quicken(SPACE, "toy")
        yield made
        dispatch._PLANS.pop("toy").clear()
        for plans in dispatch._PLANS.values():
            plans.repeated[:] = [known for known in plans.repeated if not known[0].startswith(f"{SPACE}::")]


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The C function, as TVM-FFI gives it to Python."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    built = tmp_path_factory.mktemp("probe") / "probe.so"
    include = (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    source = Path(__file__).parent / "probe.c"
    flags = [*(f"-I{i}" for i in include), f"-L{ffi.parent}", "-ltvm_ffi", f"-Wl,-rpath,{ffi.parent}"]
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, *flags], check=True)
    return tvm_ffi.load_module(str(built))["probe"]


@pytest.fixture
def toy(library, probe, monkeypatch):
    """TOY as an op that launches twice: out = factor * (3 * x - y) - rest, by memory of the call's own."""
    run = repeat.watched(probe)
    state = {"planned": 0, "spin": 0}

    def make_plan(op, args):
        assert op is TOY
        state["planned"] += 1
        rest = torch.full((64,), 0.5)

        def launch(x, y, factor, mode, flag):
            out = dispatch.allocate(tuple(x.shape), dtype=x.dtype, device=x.device)
            if mode == "copies":
                x = x.clone()
            between = torch.empty(2, x.numel())
            half = between[1].view(x.shape)
            run((x, y, half), 3.0, 0)
            run((half, rest[: x.numel()], out), factor, state["spin"])
            return out

        return dispatch.Plan(launch, "sm90 (simulated)")

    monkeypatch.setattr(dispatch, "make_plan", make_plan)
    dispatch._PLANS["toy"].clear()
    return state


def call(*args, **kwargs):
    return torch.ops.attnkit_repeated.toy(*args, **kwargs)


def toy_of(x, y=None, factor=2.0):
    return factor * (3 * x - (0 if y is None else y)) - 0.5


def aligned(*shape, shift=0):
    """Float32 numbers that begin at a multiple of 128 bytes, or so many elements behind one."""
    size = torch.Size(shape).numel()
    buffer = torch.empty(size + 64)
    begin = (-buffer.data_ptr() % 128) // 4 + shift
    return buffer[begin : begin + size].view(shape).normal_()


def repeated(name="toy"):
    return native.extension.repeated(f"{SPACE}::{name}", "CPU")


def known(name="toy"):
    return native.extension.size(f"{SPACE}::{name}", "CPU")


def test_the_second_call_is_recorded_and_the_third_repeated(toy):
    before = repeated()
    for step in range(6):
        x, y = aligned(4, 8), aligned(4, 8)
        assert torch.equal(call(x, y), toy_of(x, y))
        assert (toy["planned"], known(), repeated() - before) == (1, min(step, 1), max(0, step - 1))


def test_nothing_is_taken_for_the_same_that_differs(toy):
    """Sizes, scalars, what is left out; and what the launch decides: alignment, and which arguments are one."""
    calls = [
        (aligned(4, 8), aligned(4, 8), {}),
        (aligned(4, 8), aligned(4, 8), dict(factor=3.0)),
        (aligned(8, 4), aligned(8, 4), {}),
        (aligned(4, 8), None, {}),
        (aligned(4, 8, shift=1), aligned(4, 8), {}),
    ]
    x = aligned(4, 8)
    calls.append((x, x, {}))
    before = repeated()
    for step in range(4):
        for x, y, kwargs in calls:
            assert torch.equal(call(x, y, **kwargs), toy_of(x, y, **kwargs)), step
    # Python has one plan for the first and the last two, which the first call of these therefore records.
    assert known() == len(calls) and toy["planned"] == 4 and repeated() - before == 2 * 4 + 3 * 2


def test_inputs_of_one_storage_are_told_apart(toy):
    """Halves of a buffer at distances that change from call to call."""
    for distance in (32, 64, 96, 64, 32, 96):
        buffer = aligned(256)
        x, y = buffer[:32].view(4, 8), buffer[distance : distance + 32].view(4, 8)
        assert torch.equal(call(x, y), toy_of(x, y))
    assert repeated()


def test_what_copies_stays_in_python(toy):
    before = repeated()
    for _ in range(4):
        x = aligned(3, 5)
        assert torch.equal(call(x, mode="copies"), toy_of(x))
    assert repeated() == before and known() == 1
    assert dispatch.UNREPEATED["toy"] == "it runs aten.clone.default"


def test_errors_of_a_launch_are_raised_and_do_no_harm(toy):
    x = aligned(4, 8)
    for _ in range(3):
        with pytest.raises(ValueError, match="the factor is negative"):
            call(x, factor=-1.0)
    toy["spin"] = 0
    call(x, factor=1.0), call(x, factor=1.0)
    assert torch.equal(call(x, factor=1.0), toy_of(x, factor=1.0))


def test_plans_are_bounded_and_cleared(toy):
    for n in range(1, 4 * MOST):
        x = aligned(n)
        for _ in range(3):
            assert torch.equal(call(x), toy_of(x))
        assert known() <= MOST
    dispatch._PLANS["toy"].clear()
    assert known() == 0 and torch.equal(call(x), toy_of(x))


def test_python_runs_every_call_while_it_is_off(toy):
    x = aligned(4, 8)
    for _ in range(3):
        call(x)
    before = repeated()
    with native.off():
        with native.off():
            assert torch.equal(call(x), toy_of(x))
        assert torch.equal(call(x), toy_of(x)) and repeated() == before
        with parity.guarded_outputs() as fences:
            call(x)
        assert len(fences) == 1
    assert torch.equal(call(x), toy_of(x)) and repeated() == before + 1


def test_threads_share_plans(toy):
    """Launches that take their time, of two signatures in four threads, while others make and clear plans."""
    toy["spin"], wrong, done = 2000, [], threading.Event()
    for _ in range(2):
        call(aligned(4, 8), factor=5.0), call(aligned(16), factor=5.0)

    def work(shape):
        for _ in range(300):
            x = aligned(*shape)
            if not torch.equal(call(x, factor=5.0), toy_of(x, factor=5.0)):
                wrong.append(shape)

    def disturb():
        while not done.is_set():
            x = aligned(5)
            if not torch.equal(call(x), toy_of(x)):
                wrong.append((5,))
            native.extension.clear(f"{SPACE}::toy", "CPU")

    before = repeated()
    threads = [threading.Thread(target=work, args=(s,)) for s in ((4, 8), (16,), (4, 8), (16,))]
    other = threading.Thread(target=disturb)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not wrong and repeated() > before


def test_nothing_is_kept_of_a_call(toy):
    x = aligned(4, 8)
    for _ in range(3):
        out = call(x)
    storage = x.untyped_storage()
    references = torch._C._storage_Use_Count(storage._cdata)
    for _ in range(20):
        call(x)
    del out
    gc.collect()
    assert torch._C._storage_Use_Count(storage._cdata) == references


def test_inference_tensors(toy):
    x = aligned(4, 8)
    for _ in range(3):
        assert not call(x).is_inference()
    with torch.inference_mode():
        assert call(x).is_inference() and torch.equal(call(x), toy_of(x))
    assert not call(x).requires_grad
    with torch.inference_mode():  # recorded there, too
        x = aligned(7)
        for _ in range(3):
            assert torch.equal(call(x), toy_of(x))
    assert not call(aligned(7)).is_inference()


def _called(launch):
    """``repeat.callee`` in the simulator: the function that ``sim.ptx.library`` calls, and what it wants around it."""
    from torch_attnkit.sim.ptx import launch as ptx_launch
    from torch_attnkit.sim.ptx import memory

    def around(tensors, run):
        with memory.visible(*tensors), ptx_launch.raising():
            run()

    return inspect.getclosurevars(launch).nonlocals["function"].__chandle__(), around


@pytest.fixture
def simulated(library, monkeypatch):
    pytest.importorskip("torch_attnkit.sim._ptx")
    monkeypatch.setattr(repeat, "callee", _called)


def on_device(t):
    """A copy at a multiple of 128 bytes: where memory begins belongs to a signature."""
    buffer = torch.empty(t.nbytes + 256, dtype=torch.uint8)
    begin = -buffer.data_ptr() % 128
    return buffer[begin : begin + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def outcome(op, args, kwargs, arch):
    """What a call in the tests' namespace writes and returns, on copies of ``args`` at multiples of 128 bytes."""
    moved = []
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_contiguous():
            a = on_device(a)
        moved.append(a.clone() if isinstance(a, torch.Tensor) and not a.is_contiguous() else a)
    with simulate(arch):
        out = getattr(torch.ops.attnkit_repeated, op.name)(*moved, **kwargs)
    return [*parity.mutated(op, moved), *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]


ROWS = [(op, arch) for op in dispatch.OPS.values() for arch in ("sm90", "sm100")]
ROWS = [(op, arch) for op, arch in ROWS if any(arch in row.archs for row in op.kernels)]
# Light ones, of them one with a workspace and one that writes in place.
ALWAYS = {("sdpa_decode", "sm90"), ("kv_cache_write", "sm90"), ("indexer_topk", "sm90"), ("nvfp4_quantize", "sm100")}


@pytest.mark.simulator
@pytest.mark.seconds(1200)
@pytest.mark.parametrize(
    ("op", "arch"),
    [
        pytest.param(op, arch, id=f"{op.name}-{arch}", marks=() if (op.name, arch) in ALWAYS else pytest.mark.proof)
        for op, arch in ROWS
    ],
)
def test_simulated_kernels_are_repeated_to_the_bit(op, arch, simulated, request):
    """A case of some ops; with ``--proof`` a dozen of every row."""
    every = request.config.getoption("--proof")
    hits = 0
    for index in (i for i, row in enumerate(op.kernels) if arch in row.archs):
        found = [c for c in parity.cases(op, index, arch, covering=True) if c.shape not in ("one", "empty")]
        for case in found[:: max(1, len(found) // 12)] if every else found[:1] if not hits else ():
            args, kwargs = parity.arguments(case)
            if op.kernels[index].refusal(parity.bound(op, args, kwargs)) is None:
                hits += repeats(op, args, kwargs, arch)
    assert hits


def repeats(op, args, kwargs, arch):
    """How many of three calls were repeated by C++; all must be what Python's is."""
    with native.off():
        wanted = outcome(op, args, kwargs, arch)
    before = repeated(op.name)
    for _ in range(3):
        got = outcome(op, args, kwargs, arch)
        for g, w in zip(got, wanted, strict=True):
            assert g.shape == w.shape and g.stride() == w.stride() and g.dtype == w.dtype
            assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (g, w)))
    return repeated(op.name) - before


@pytest.mark.simulator
@pytest.mark.seconds(600)
def test_caches_side_by_side_share_no_memory_and_one_inside_of_another_does(simulated):
    """Keys and values of one buffer reach into one another's bytes. Tokens that lie in a cache are copied by Python."""
    op = torch.ops.attnkit_repeated.paged_kv_cache_write
    key, value = torch.randn(2, 3, 2, 64).bfloat16().unbind()
    slot = torch.tensor([5, -1, 20])

    def hits(key, k_cache, v_cache):
        before = repeated("paged_kv_cache_write")
        for _ in range(3):
            with simulate("sm90"):
                op(key, value, k_cache, v_cache, slot)
            assert torch.equal(k_cache[0, 5], key[0]) and torch.equal(v_cache[1, 4], value[2])
        return repeated("paged_kv_cache_write") - before

    key, value = on_device(key), on_device(value)
    pages = on_device(torch.zeros(2, 16, 2, 128).bfloat16())
    assert hits(key, *pages.chunk(2, -1)) == 1
    assert hits(key, *reversed(pages.chunk(2, -1))) == 3
    apart = on_device(torch.zeros(2, 2, 16, 2, 64).bfloat16())
    assert hits(apart[0, 1, 9:12], *apart) == 0  # token 0 is written to another place of the same cache
    assert hits(key, *on_device(torch.zeros(2, 16, 2, 2, 64).bfloat16()).unbind(3)) == 3  # the same strides


@pytest.mark.simulator
@pytest.mark.seconds(600)
def test_forms_that_write_into_given_tensors_are_repeated(simulated):
    op = dispatch.OPS["nvfp4_quantize"]
    x = on_device(torch.randn(4, 64).bfloat16())
    want = outcome(op, (x,), {}, "sm100")
    before = repeated("nvfp4_quantize_out")
    for _ in range(3):
        outs = [on_device(torch.full_like(t, 77)) for t in want]
        with simulate("sm100"):
            torch.ops.attnkit_repeated.nvfp4_quantize_out(x, **dict(zip(op.outnames, outs, strict=True)))
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outs, want, strict=True))
    assert repeated("nvfp4_quantize_out") - before == 1


@pytest.mark.simulator
@pytest.mark.seconds(600)
def test_what_is_cast_before_a_launch_stays_in_python(simulated):
    """The cast is no launch of ours. Later lengths are read, not those of the call that was planned."""
    op = dispatch.OPS["sdpa_decode"]
    q, cache = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 2, 40, 64).bfloat16()
    for lengths in ((40, 3), (1, 39), (17, 17), (2, 40)):
        length = torch.tensor(lengths)
        want = outcome(op, (q, cache, cache, length.int()), {}, "sm90")
        before = repeated(op.name)
        got = outcome(op, (q, cache, cache, length), {}, "sm90")
        assert repeated(op.name) == before and all(map(torch.equal, got, want))
    assert dispatch.UNREPEATED[op.name] == "it runs aten.to.dtype"


@pytest.mark.simulator
@pytest.mark.seconds(600)
def test_persistent_blocks_are_repeated_to_the_bit(simulated, monkeypatch):
    """Those of a batch of few queries: a workspace, in which blocks leave splits, and counters beside it."""
    from torch_attnkit.kernels.prefill.sm90 import plan

    for limit in ("_SHARED_FROM", "_SHARED_KEYS"):
        monkeypatch.setattr(plan, limit, 0)
    lengths = torch.tensor([3, 1400, 0, 129, 64], dtype=torch.int32)
    args = [aligned(*shape).bfloat16() for shape in ((5, 3, 4, 64), (5, 2, 1400, 64), (5, 2, 1400, 64))]
    assert repeats(dispatch.OPS["sdpa_multi"], [*args, lengths], {}, "sm90") > 0


@pytest.mark.simulator
@pytest.mark.seconds(600)
@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_varlen"])
def test_dynamic_tiles_are_repeated_to_the_bit(op, simulated, monkeypatch):
    """A counter that each call leaves at zero, and with no sinks memory in their place."""
    from torch_attnkit.kernels.prefill.sm90 import plan

    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    shapes = ((2, 130, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64))
    args = [aligned(*shape).bfloat16() for shape in shapes]
    if op == "flash_attention_varlen":
        offsets = torch.tensor([0, 33, 260], dtype=torch.int32)
        args = [*(t.flatten(0, 1) for t in args), offsets, offsets]
    dynamic, plans = plan.dynamic, []
    monkeypatch.setattr(plan, "dynamic", lambda *sizes: plans.append(dynamic(*sizes)) or plans[-1])
    assert repeats(dispatch.OPS[op], args, {"causal": True}, "sm90") > 0
    assert plans and None not in plans


@pytest.fixture
def merging(simulated):
    """A small call of a real op that is repeated already: its function, and its arguments."""
    args = aligned(2, 3, 4, 32), aligned(2, 3, 4)
    merge = torch.ops.attnkit_repeated.merge_partials
    with simulate("sm90"):
        before = repeated("merge_partials")
        for _ in range(3):
            want = merge(*args)
        assert repeated("merge_partials") > before
        yield merge, args, want


def same(got, want):
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.simulator
def test_a_simulated_arch_belongs_to_the_signature(merging):
    merge, args, want = merging
    before = repeated("merge_partials")
    assert same(merge(*args), want) and repeated("merge_partials") == before + 1
    with simulate("sm100"):
        merge(*args)
    assert repeated("merge_partials") == before + 1


@pytest.mark.simulator
def test_batch_invariance_belongs_to_the_signature(merging):
    merge, args, want = merging
    with batch_invariant():
        before = repeated("merge_partials")
        for _ in range(2):
            merge(*args)
        assert repeated("merge_partials") == before, "of other calls"
        assert same(merge(*args), want) and repeated("merge_partials") == before + 1
    assert same(merge(*args), want) and repeated("merge_partials") == before + 2


@pytest.mark.simulator
def test_what_lies_between_autograd_and_a_backend_goes_to_python(merging):
    """Gradients, tangents, transforms, modes, subclasses and negated views: as Python has it, none of them repeated."""
    merge, (part, lse), want = merging
    before = repeated("merge_partials")
    with pytest.raises(NotImplementedError, match="merge_partials has no backward"):
        merge(part.clone().requires_grad_(), lse)[0].sum().backward()
    with pytest.raises(NotImplementedError, match="part.* has a tangent"):
        torch.func.jvp(lambda p: merge(p, lse)[0], (part,), (part,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(part, part)
        with pytest.raises(NotImplementedError, match="has a tangent"):
            merge(dual, lse)
    assert same(merge(torch._neg_view(-part), lse), want)
    assert repeated("merge_partials") == before
    mapped = torch.vmap(lambda p: merge(p, lse))(torch.stack([part, part]))
    assert same([m[1] for m in mapped], want)
    with torch.no_grad():
        assert same(merge(part.clone().requires_grad_(), lse), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(merge(part, lse), want)
    with pytest.raises(TypeError, match="merge_partials: lse_partial is None"):
        merge(part, None)
    with pytest.raises(ValueError, match="merge_partials: lse_partial"):
        merge(part, lse[0])


@pytest.mark.simulator
def test_what_is_written_to_gets_a_new_version_and_may_not_overlap(simulated):
    write, name = torch.ops.attnkit_repeated.kv_cache_write, "kv_cache_write"
    slot = torch.tensor([3, 1], dtype=torch.int32)
    before = repeated(name)
    with simulate("sm90"):
        for _ in range(4):
            cache, kv = aligned(6, 32), aligned(2, 32)
            version = cache._version
            write(kv, cache, slot)
            assert cache._version == version + 1 and torch.equal(cache[[3, 1]], kv)
        with torch.inference_mode():
            cache = aligned(6, 32)
            write(kv, cache, slot)
            assert torch.equal(cache[[3, 1]], kv)
        assert repeated(name) > before
        before = repeated(name)
        for _ in range(4):
            buffer = aligned(8, 32)
            cache, kv = buffer[:6], buffer[3:5]
            want = kv.clone()
            write(kv, cache, slot)
            assert torch.equal(cache[[3, 1]], want)
        assert repeated(name) == before


@contextlib.contextmanager
def seen_by_a_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        yield mode.names


@pytest.mark.simulator
def test_modes_see_the_op(merging):
    merge, args, want = merging
    with seen_by_a_mode() as names:
        assert same(merge(*args), want)
    assert names[0].endswith("::merge_partials")
