"""Calls that C++ reads (csrc/dispatch/call.cpp): what arrives is what torch would read, and so is every error."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import torch_attnkit  # noqa: F401  defines the ops
from torch_attnkit.core import dispatch, native

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"eager calls: {native.word}")
SPACE = "attnkit_quick"
SCHEMA = (
    "read(Tensor a, Tensor? b=None, float c=1.5, *, int d, bool e=False, str f='plain', ScalarType? g=None, "
    "float? h=None, int? i=7, bool? j=None, str? k=None) -> (Tensor, Tensor)"
)
MATRIX = torch.arange(6.0).view(2, 3)


class Subclass(torch.Tensor):
    pass


class Duck:
    """No tensor, and torch asks it all the same."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "quack", str(func), len(args), sorted(kwargs or {})

    def __float__(self):
        return 1.0


GOOD = {
    "a": [MATRIX, MATRIX.double(), torch.nn.Parameter(MATRIX), torch.nn.Buffer(MATRIX), MATRIX[:, :2]],
    "b": [None, MATRIX],
    "c": [0.0, -2.5, float("inf"), 3],
    "d": [0, -1, 2**63 - 1, -(2**63), 5],
    "e": [True, False],
    "f": ["plain", "", "é" * 9, "other"],
    "g": [None, torch.bfloat16, torch.float8_e4m3fn],
    "h": [None, 0.25, 1],
    "i": [None, 12],
    "j": [None, True],
    "k": [None, "word"],
}
ANY = [
    None, 1, 1.5, True, 2**63, -(2**80), 10**400, "text", "\ud800", b"bytes", MATRIX, MATRIX.as_subclass(Subclass),
    Duck(), [MATRIX], np.int64(3), np.float32(1.5), np.bool_(True), torch.tensor(3), torch.float16,
    torch.strided, (1, 2), object,
]  # fmt: skip
NAMES = list(GOOD)


@pytest.fixture(scope="module")
def arrived():
    """An op of all kinds of arguments; in the list is what its kernel was last given."""
    library, found = torch.library.Library(SPACE, "DEF"), []
    library.define(SCHEMA)

    def kernel(*args, **kwargs):
        found[:] = [args, kwargs]
        return torch.ones(1), torch.zeros(1)

    library.impl("read", kernel, "CompositeExplicitAutograd")
    native.quicken(SPACE, "read")
    yield found
    library._destroy()


@pytest.fixture
def asked(arrived, monkeypatch):
    """The calls that torch has read, of what ``arrived`` tells."""
    calls, way = [], read()._op
    monkeypatch.setattr(read(), "_op", lambda *args, **kwargs: calls.append((args, kwargs)) or way(*args, **kwargs))
    return calls


def read():
    return torch.ops.attnkit_quick.read


def described(value):
    """What can be compared of anything: of tensors which one it is."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.data_ptr(), value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    return (
        {n: described(v) for n, v in value.items()} if isinstance(value, dict) else (type(value).__name__, repr(value))
    )


def outcome(arrived, call, args, kwargs):
    """What a call passes on, or its error in words."""
    arrived.clear()
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return described(list(arrived)), described(result) if isinstance(result[0], str) else [t.item() for t in result]


def generate(rng):
    """A call: mostly right, by position and by name in any order; or with one thing, or some, wrong."""
    wrong = rng.random() < 0.5
    names = [n for n in NAMES if n in "ad" or rng.random() < 0.5]
    values = {n: rng.choice(GOOD[n]) for n in names}
    if wrong and rng.random() < 0.7:
        values[rng.choice(NAMES)] = rng.choice(ANY)
    if wrong and rng.random() < 0.2:
        values.pop(rng.choice(list(values)))
    args = []
    for name in NAMES[: rng.randrange(4 if not wrong else 6)]:
        if name not in values:
            break
        args.append(values[name] if wrong and rng.random() < 0.1 else values.pop(name))  # now and then given twice
    if wrong and rng.random() < 0.1:
        values[rng.choice(["x", "self", "A", "args"])] = 1
    return args, dict(rng.sample(list(values.items()), len(values)))


@pytest.mark.parametrize("seed", range(4))
def test_what_arrives_is_what_torch_reads(arrived, seed):
    rng, errors = random.Random(seed), 0
    for _ in range(1500):
        args, kwargs = generate(rng)
        want = outcome(arrived, read()._op, args, kwargs)
        assert outcome(arrived, read(), args, kwargs) == want, (args, kwargs)
        errors += isinstance(want[0], type)
    assert 200 < errors < 900


def test_plain_calls_are_not_torch_s_to_read(arrived, asked):
    for args, kwargs in [
        ((MATRIX,), dict(d=1)),
        ((MATRIX, None, 2.0), dict(f="other", d=1, e=True, g=torch.bfloat16, h=None, k="word")),
        ((), dict(d=1, a=torch.nn.Parameter(MATRIX), b=MATRIX, c=3, i=-5, j=False)),
    ]:
        read()(*args, **kwargs)
    assert not asked
    with native.off():
        read()(MATRIX, d=1)
    assert len(asked) == 1


WRONG = {
    "nothing": ((), {}),
    "what is required is missing": ((MATRIX,), {}),
    "by position what has a name alone": ((MATRIX, None, 1.0, 3), dict(d=1)),
    "an unknown name": ((MATRIX,), dict(d=1, x=2)),
    "given twice": ((MATRIX,), dict(d=1, a=MATRIX)),
    "None for a tensor": ((None,), dict(d=1)),
    "None for an int": ((MATRIX,), dict(d=None)),
    "a list for a tensor": (([MATRIX],), dict(d=1)),
    "a subclass": ((MATRIX.as_subclass(Subclass),), dict(d=1)),
    "a subclass that may be None": ((MATRIX, MATRIX.as_subclass(Subclass)), dict(d=1)),
    "what torch asks": ((Duck(),), dict(d=1)),
    "what torch asks for an int": ((MATRIX,), dict(d=Duck())),
    "what torch asks for a float": ((MATRIX, None, Duck()), dict(d=1)),
    "a float for an int": ((MATRIX,), dict(d=1.0)),
    "a bool for an int": ((MATRIX,), dict(d=True)),
    "an int of more than 64 bits": ((MATRIX,), dict(d=2**63)),
    "a number of another library": ((MATRIX,), dict(d=np.int64(1))),
    "a tensor for an int": ((MATRIX,), dict(d=torch.tensor(1))),
    "a float beyond all": ((MATRIX, None, 10**400), dict(d=1)),
    "a string for a float": ((MATRIX, None, "1"), dict(d=1)),
    "an int for a bool": ((MATRIX,), dict(d=1, e=1)),
    "bytes for a string": ((MATRIX,), dict(d=1, f=b"plain")),
    "half a surrogate pair": ((MATRIX,), dict(d=1, f="\ud800")),
    "an int for a dtype": ((MATRIX,), dict(d=1, g=15)),
    "a layout for a dtype": ((MATRIX,), dict(d=1, g=torch.strided)),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_calls_are_torch_s_with_the_very_same_arguments(arrived, asked, what):
    args, kwargs = WRONG[what]
    got = outcome(arrived, read(), args, kwargs)
    assert asked and got == outcome(arrived, read()._op, args, kwargs)
    assert [id(v) for v in asked[0][0]] == [id(v) for v in args] and list(asked[0][1].items()) == list(kwargs.items())


class Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_torch_functions_see_the_call(arrived, asked):
    with Names() as mode:
        read()(MATRIX, d=1)
    assert mode.seen == ["attnkit_quick.read"] and asked
    with torch.device("meta"):
        assert [t.device.type for t in read()(MATRIX, d=1)] == ["cpu", "cpu"]


def test_nothing_is_kept_of_a_call(arrived):
    text, number, tensor = "".join(["wo", "rd"]), 1e9 + 7, torch.ones(2)
    held = [sys.getrefcount(v) for v in (text, number, tensor)]
    for _ in range(50):
        read()(tensor, tensor, number, d=1, f=text)
        with pytest.raises(RuntimeError):
            read()(tensor, tensor, number, d=1, f=text, k=3)
        arrived.clear()
    assert [sys.getrefcount(v) for v in (text, number, tensor)] == held
    results = read()(tensor, d=1)
    assert [sys.getrefcount(t) for t in results] == [sys.getrefcount(t) for t in (torch.ones(1), torch.ones(1))]


def test_an_overload_that_is_added_is_found(arrived, asked):
    library = torch.library.Library(SPACE, "FRAGMENT")
    library.define("read.other(Tensor a, str text) -> Tensor")
    library.impl("read.other", lambda a, text: a + len(text), "CompositeExplicitAutograd")
    assert torch.equal(read()(MATRIX, "abc"), MATRIX + 3) and len(read()(MATRIX, d=1)) == 2
    library._destroy()


route = torch.ops.attnkit.route_softmax


def routed(t):
    return torch.ops.attnkit.route_softmax(t, topk=2)


def test_every_op_has_such_a_packet_which_is_torch_s_in_all_else():
    assert route is torch.ops.attnkit.route_softmax and hash(route) == hash(route._op)
    for name in dispatch.OPS:
        packet = getattr(torch.ops.attnkit, name)
        plain = torch._ops.OpOverloadPacket(packet._qualified_op_name, name, packet._op, packet._overload_names)
        assert isinstance(packet, torch._ops.OpOverloadPacket) and type(packet).__name__ == "QuickPacket"
        assert (repr(packet), str(packet), packet.overloads()) == (repr(plain), str(plain), ["default"])
        assert packet.default.overloadpacket is packet and packet.default._schema == plain.default._schema
        assert packet.__module__ == "torch._ops.attnkit" and copy.deepcopy(packet) is packet
        assert inspect.signature(packet) == inspect.signature(plain)
        assert set(vars(plain)) <= set(vars(packet))
    with pytest.raises(AttributeError, match="no overload name 'other'"):
        _ = route.other


@pytest.mark.seconds(300)
def test_what_traces_and_compiles_takes_it_for_torch_s():
    x = torch.arange(16.0).view(2, 8)
    want = routed(x)

    def same(got):
        return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))

    for held in (routed, lambda t: route(t, topk=2)):
        torch._dynamo.reset()
        assert same(torch.compile(held, fullgraph=True, backend="aot_eager")(x))
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(routed, tracing_mode=mode)(x)
        assert "torch.ops.attnkit.route_softmax.default" in graph.code and same(graph(x))
    traced = torch.fx.symbolic_trace(routed)
    assert next(n for n in traced.graph.nodes if n.op == "call_function").target is route and same(traced(x))

    class Module(torch.nn.Module):
        def forward(self, t):
            return torch.ops.attnkit.route_softmax(t, topk=2)

    for strict in (True, False):
        assert same(torch.export.export(Module(), (x,), strict=strict).module()(x))
    jitted = torch.jit.trace(routed, (x,))
    assert "attnkit::route_softmax" in str(jitted.graph) and same(jitted(x))
    assert same(torch.jit.script(Module())(x))
    torch.library.opcheck(route, (x,), dict(topk=2))
    with FakeTensorMode() as fake:
        assert all(isinstance(t, FakeTensor) for t in routed(fake.from_tensor(x)))


def test_a_profile_shows_the_op():
    x = torch.randn(2, 8)
    with torch.autograd.profiler.profile(record_shapes=True) as found:
        routed(x)
    assert [e.input_shapes[0] for e in found.function_events if e.name == "attnkit::route_softmax"] == [[2, 8]]


@pytest.mark.filterwarnings("ignore:Named tensors")
@pytest.mark.skipif(not hasattr(torch.Tensor, "rename"), reason="this torch has no named tensors")
def test_named_tensors_are_refused():
    with pytest.raises(RuntimeError, match="[Nn]amed tensors"):
        routed(torch.randn(2, 8).rename("a", "b"))


def test_errors_below_are_those_of_torch_s_way():
    x = torch.zeros(2, 8)
    for args, kwargs in [
        ((x,), dict(topk=9)), ((x.long(),), dict(topk=2)), ((x.to_sparse(),), dict(topk=2)), ((x[0, 0],), dict(topk=2)),
        ((x * float("nan"),), dict(topk=2)), ((x.to("meta"),), dict(topk=9)),
    ]:  # fmt: skip
        with pytest.raises(Exception) as wanted:
            route._op(*args, **kwargs)
        with pytest.raises(type(wanted.value)) as got:
            route(*args, **kwargs)
        assert str(got.value) == str(wanted.value)


def test_threads_read_at_once(arrived):
    wrong = []

    def work(topk):
        for step in range(300):
            x = torch.randn(step % 3 + 1, 8)
            if not torch.equal(route(x, topk=topk)[1], torch.topk(x, topk)[1]):
                wrong.append(topk)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
