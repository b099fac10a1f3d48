"""The table's machinery: specs, binding, choice of a row, plans, targets, the simulated path down to the runtime."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import types

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Kernel, Op, UnsupportedError, config, dispatch, runtimes, simulate, target
from torch_attnkit.core.spec import parse

TOY = Op(
    schema="toy(Tensor x, Tensor codes, Tensor? scale=None, *, int k=1, str mode='a') -> (Tensor out, Tensor extra)",
    dims={"x": "... N", "codes": "M N/2:u8", "scale": ":f32", "out": "... K:T", "extra": "M+1:i32"},
    derive={"K": lambda c: 2 * c.arg.k},
    where={"k must be at least 1": lambda c: c.arg.k >= 1},
    unless={"extra": lambda c: c.arg.mode == "b"},
    choices={"mode": ("a", "b")},
    features={"scaled": lambda c: c.arg.scale is not None},
    kernels=(
        Kernel("sm90", "bf16", {"N": (4, 8)}, ""),
        Kernel("cuda", "bf16 f16", {"N": (4,)}, "scaled", {"M must be even": lambda c: c.dim["M"] % 2 == 0}),
    ),
)


def bind(x=(2, 3, 4), codes=(5, 2), scale=None, k=1, mode="a", dtype=torch.bfloat16):
    x, codes = torch.zeros(x, dtype=dtype), torch.zeros(codes, dtype=torch.uint8)
    return TOY.bind((x, codes, scale, k, mode))


def test_specs_name_divide_add_and_batch():
    spec = parse("... N K/2 B+1 16:f16|u8")
    assert spec.batch and [str(a) for a in spec.axes] == ["N", "K/2", "B+1", "16"] and spec.dtypes == ("f16", "u8")
    assert str(spec) == "(..., N, K/2, B+1, 16)"
    with pytest.raises(ValueError, match="unknown dtype 'f17'"):
        parse("N:f17")


def test_bind_finds_sizes_batch_dtype_and_features():
    call = bind(scale=torch.tensor(1.0))
    assert call.dim == {"N": 4, "M": 5, "K": 2} and call.batch == (2, 3)
    assert call.dtype == torch.bfloat16 and call.features == ("scaled",)
    assert TOY.outputs(call) == [((2, 3, 2), torch.bfloat16), ((6,), torch.int32)]
    assert TOY.outputs(bind(mode="b"))[1] == ((0,), torch.int32)
    assert bind(x=(4,)).batch == ()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(codes=(5, 3)), r"toy: codes must be \(M, N/2\), got shape \(5, 3\): N=6, but x has N=4"),
        (dict(codes=(5,)), r"toy: codes must be \(M, N/2\), got shape \(5,\)"),
        (dict(k=0), r"toy: k must be at least 1 \(got N=4, M=5, K=0\)"),
        (dict(mode="c"), r"toy: mode is 'c', accepted: a, b"),
        (dict(scale=torch.zeros(2)), r"toy: scale must be \(\), got shape \(2,\)"),
    ],
)
def test_bind_refuses_with_found_and_accepted(kwargs, message):
    with pytest.raises(ValueError, match=message):
        bind(**kwargs)


def test_bind_refuses_dtypes():
    with pytest.raises(TypeError, match="toy: x is i32, accepted: f32, bf16, f16, f64"):
        bind(dtype=torch.int32)


def test_first_accepting_row_wins_and_the_nearest_rows_say_why_there_is_none():
    sm90, sm100 = target.Target("sm90"), target.Target("sm100", simulated=True)
    assert dispatch.resolve(TOY, bind(), sm90).on == "sm90"
    even = bind(codes=(4, 2), scale=torch.tensor(1.0))
    assert dispatch.resolve(TOY, even, sm90).on == "cuda"
    with pytest.raises(UnsupportedError) as error:
        dispatch.resolve(TOY, bind(scale=torch.tensor(1.0)), sm90)
    assert str(error.value) == "toy on sm90: cuda: M must be even", "a row with the call's features was meant"
    with pytest.raises(UnsupportedError) as error:
        dispatch.resolve(TOY, bind(x=(6,), codes=(4, 3)), sm100)
    assert str(error.value) == "toy on sm100 (simulated): cuda: N=6 not in {4}"
    answers = ["a: N=6 not in {4}", "a: no", "a: N=6 not in {8, 4}", "a: no", "a: M=6 not in {4}", "b: N=6 not in {2}"]
    expected = ["a: N=6 not in {4, 8}", "a: no", "a: M=6 not in {4}", "b: N=6 not in {2}"]
    assert dispatch.unique(answers) == expected
    pairs = ["a: N=6 not in {4} and M=6 not in {2}", "a: N=6 not in {4}", "a: N=6 not in {4} and M=6 not in {8}"]
    assert dispatch.unique(pairs) == ["a: N=6 not in {4} and M=6 not in {2, 8}", "a: N=6 not in {4}"]
    with pytest.raises(
        UnsupportedError, match=r"toy on metal: no kernel yet \(there are kernels for: sm80, sm89, sm90, sm100, sm120\)"
    ):
        dispatch.resolve(TOY, bind(), target.Target("metal"))
    assert dispatch.resolve(TOY, bind(), target.Target("cpu")) is None


def decode_args():
    q, kv = torch.randn(2, 4, 8), torch.randn(2, 2, 5, 8)
    return q, kv, kv.clone(), torch.tensor([5, 3], dtype=torch.int32)


def test_plans_are_cached_per_signature_and_bounded(monkeypatch):
    plans = dispatch._PLANS["sdpa_decode"]
    plans.clear()
    args = decode_args()
    for _ in range(3):
        torch.ops.attnkit.sdpa_decode(*args)
    assert len(plans) == 1, "kv_len's values are not part of the signature"
    torch.ops.attnkit.sdpa_decode(*args, window=3)
    permuted = args[1].transpose(0, 1).contiguous().transpose(0, 1)
    torch.ops.attnkit.sdpa_decode(args[0], permuted, *args[2:])
    assert len(plans) == 3, "scalars and strides are"
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 2)
    torch.ops.attnkit.sdpa_decode(*args, window=4)
    assert len(plans) == 1


def fake_metal(monkeypatch):
    """A stand-in for the Metal simulator and a row that uses it: what is tested is the path down to the runtime."""
    compiled = []

    class Library:
        def __getattr__(self, name):
            return lambda q, k, v, n, out, lse: (out.fill_(1.5), lse.zero_())

    simulator = types.ModuleType("torch_attnkit.sim.metal")
    simulator.compile_shader = lambda source: compiled.append(source) or Library()
    simulator.require = lambda: None
    package = types.ModuleType("torch_attnkit.sim")
    package.__path__ = []
    package.__spec__ = types.SimpleNamespace(name="torch_attnkit.sim")
    monkeypatch.setitem(sys.modules, "torch_attnkit.sim", package)
    monkeypatch.setitem(sys.modules, "torch_attnkit.sim.metal", simulator)
    simulator.__spec__ = types.SimpleNamespace(name="torch_attnkit.sim.metal")
    host = types.ModuleType("torch_attnkit.ops.sdpa_decode.mps")

    def build(call, where):
        library = runtimes.of(where.arch, where.simulated).compile_shader("kernel void sdpa() {}")
        return lambda q, k, v, n, *rest: library.sdpa(q, k, v, n, *rest[-2:])

    host.build = build
    monkeypatch.setitem(sys.modules, "torch_attnkit.ops.sdpa_decode.mps", host)
    op = dispatch.OPS["sdpa_decode"]
    row = Kernel("mps", "f32", {"D": (8,)}, "gqa")
    changed = dataclasses.replace(op, kernels=(row,))
    monkeypatch.setattr(
        dispatch, "resolve", lambda o, c, t, real=dispatch.resolve: real(changed if o is op else o, c, t)
    )
    return compiled


def test_simulate_takes_the_row_down_to_the_runtime_and_nothing_else(monkeypatch):
    compiled = fake_metal(monkeypatch)
    args = decode_args()
    plain, _ = torch.ops.attnkit.sdpa_decode(*args)
    with simulate("metal") as where, torch_attnkit.record() as ran:
        assert str(where) == "metal (simulated)"
        out, lse = torch.ops.attnkit.sdpa_decode(*args)
        with pytest.raises(UnsupportedError, match=r"sdpa_decode on metal \(simulated\): mps: no support for: window"):
            torch.ops.attnkit.sdpa_decode(*args, window=2)
    assert bool((out == 1.5).all()) and len(compiled) == 1
    assert ran.calls == {("sdpa_decode", "metal (simulated)"): 1}
    again, _ = torch.ops.attnkit.sdpa_decode(*args)
    assert torch.equal(again, plain), "outside the block the reference runs"


def test_simulate_belongs_to_its_thread_and_task(monkeypatch):
    fake_metal(monkeypatch)
    seen = {}

    async def inside(name, arch):
        if arch is None:
            await asyncio.sleep(0)
            seen[name] = target.simulated_arch()
            return
        with simulate(arch):
            await asyncio.sleep(0)
            seen[name] = target.simulated_arch()

    async def both():
        await asyncio.gather(inside("a", "metal"), inside("b", None))

    asyncio.run(both())
    with simulate("metal"):
        thread = threading.Thread(target=lambda: seen.update(thread=target.simulated_arch()))
        thread.start()
        thread.join()
        with simulate("metal"):
            pass
        seen["nested"] = target.simulated_arch()
    assert seen == {"a": "metal", "b": None, "thread": None, "nested": "metal"}
    assert target.simulated_arch() is None


def test_simulate_refuses_what_it_does_not_know():
    with (
        pytest.raises(ValueError, match="simulate: got 'sm75', accepted: metal, sm80, sm89, sm90, sm100, sm120"),
        simulate("sm75"),
    ):
        pass


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", "cache")
    assert config.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("ATTNKIT_TARGET", "sim:sm90")
    assert config.simulated_arch(("sm90",)) == "sm90"
    monkeypatch.setenv("ATTNKIT_TARGET", "")
    assert config.simulated_arch(("sm90",)) is None
    for wrong in ("sm90", "sim:", "sim:sm80"):
        monkeypatch.setenv("ATTNKIT_TARGET", wrong)
        with pytest.raises(ValueError, match=f"ATTNKIT_TARGET: got '{wrong}', accepted: sim:sm90, gpu:sm90"):
            config.simulated_arch(("sm90",))
    monkeypatch.setenv("ATTNKIT_TARGET", "gpu:sm90")
    assert config.simulated_arch(("sm90",)) is None
    assert config.arch_on_gpu(("sm90", "metal")) == "sm90"
    monkeypatch.setenv("ATTNKIT_TARGET", "gpu:metal")
    with pytest.raises(ValueError, match="accepted: sim:sm90, sim:metal, gpu:sm90$"):
        config.arch_on_gpu(("sm90", "metal"))


def test_unknown_devices_are_refused():
    with pytest.raises(UnsupportedError, match="device 'xpu': accepted are cpu, mps and cuda"):
        target.target_of(torch.device("xpu"))


def test_functorch_and_subclasses_take_the_general_path():
    """vmap maps over the op like over any other: the short cut of the Autograd key must not swallow it."""
    q, k, v, n = decode_args()
    stacked = torch.stack([q, q * 2])
    mapped = torch.vmap(lambda x: torch.ops.attnkit.sdpa_decode(x, k, v, n)[0])(stacked)
    for got, x in zip(mapped, stacked, strict=True):
        assert torch.equal(got, torch.ops.attnkit.sdpa_decode(x, k, v, n)[0])


def test_explain_tells_rows_and_reasons(monkeypatch):
    q, k, v, n = (t.to("meta") for t in decode_args())
    text = torch_attnkit.explain("sdpa_decode", q, k, v, n, window=2, target="cpu")
    assert "features: gqa, window" in text and "ops/sdpa_decode/cpu.py on cpu" in text
    assert "refused: ValueError: sdpa_decode: k_cache must be" in torch_attnkit.explain("sdpa_decode", q, k[0], v, n)
    wide = [t.new_empty(*t.shape[:-1], 100, dtype=torch.bfloat16) for t in (q, k, v)]
    text = torch_attnkit.explain("sdpa_decode", *wide, n, target="sm90").splitlines()
    rows = [row for row in dispatch.OPS["sdpa_decode"].kernels if row.on == "sm90" and "bf16" in row.dtypes.split()]
    accepted = ", ".join(dict.fromkeys(str(size) for row in rows for size in row.dims["D"]))
    assert text.count(f"row      sm90: D=100 not in {{{accepted}}}") == 1
    assert [line for line in text if "sm100" in line] == ["row      sm100: serves sm100, not sm90"]
    both = f"D=100 not in {{{accepted}}} and Dv=100 not in {{"
    assert text[-1].startswith(f"refused: UnsupportedError: sdpa_decode on sm90: sm90: {both}")
    monkeypatch.setitem(dispatch.OPS, "toy", TOY)
    toy = torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.uint8)
    text = torch_attnkit.explain("toy", *toy, target="metal")
    assert text.endswith(
        "refused: UnsupportedError: toy on metal: no kernel yet (there are kernels for: sm80, sm89, sm90, sm100, sm120)"
    )
    with pytest.raises(
        ValueError, match="explain: target is 'sm75', accepted: cpu, metal, sm80, sm89, sm90, sm100, sm120"
    ):
        torch_attnkit.explain("sdpa_decode", q, k, v, n, target="sm75")
    with pytest.raises(ValueError, match="explain: no op 'nope'"):
        torch_attnkit.explain("nope")
    with pytest.raises(ValueError, match="sdpa_decode has no argument wndow"):
        torch_attnkit.explain("sdpa_decode", q, k, v, n, wndow=2)
