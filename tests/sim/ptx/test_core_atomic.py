"""atom and red (PTX ISA 9.7.13.5, 9.7.13.6): every operation, type, vector, and threads of the machine at once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .snippet import aligned, run
from .test_core_integer import DTYPES, edge, wrap

pytestmark = pytest.mark.simulator

OPERATIONS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    "exch": lambda a, b: b,
}
TYPES = {
    "add": ["u32", "s32", "u64"],
    "min": ["u32", "s32", "u64", "s64"],
    "max": ["u32", "s32", "u64", "s64"],
    "inc": ["u32"],
    "dec": ["u32"],
}
CASES = [(op, t) for op in OPERATIONS for t in TYPES.get(op, ["b32", "b64"])]


@pytest.mark.parametrize("space", ["global", "shared", "shared::cluster", ""])
@pytest.mark.parametrize(("op", "t"), CASES)
def test_integers(op: str, t: str, space: str) -> None:
    kind = t.replace("b", "u")
    dtype = DTYPES[kind]
    a, b = edge(kind)[:32].copy(), edge(kind)[:32].copy()
    if op in ("inc", "dec"):
        a, b = (v % 9 for v in (a, b))
    start, old, red = a.copy(), np.zeros(32, dtype), a.copy()
    r, size = ("%r", 4) if dtype.itemsize == 4 else ("%d", 8)
    address = lambda i: f"mad.wide.u32 %d{20 + i}, %tid, {size}, %in{i};"
    where = "%d20" if space in ("global", "") else "%r40"
    dot = "." + space if space else ""
    second = f"red{dot}.{op}.{t} [{where}], {r}2;" if op != "exch" else f"atom{dot}.exch.{t} _, [{where}], {r}2;"
    run(
        f"""
    {address(0)} {address(1)} {address(2)} {address(3)} ld.global.{t} {r}2, [%d21]; ld.global.{t} {r}1, [%d20];
    mov.u32 %r40, smem; mad.lo.u32 %r40, %tid, 8, %r40; st.shared.{t} [%r40], {r}1;
    atom{dot}.{op}.{t} {r}3, [{where}], {r}2; st.global.{t} [%d22], {r}3;
    ld{dot}.{t} {r}5, [{where}]; st{dot}.{t} [{where}], {r}1; {second} ld{dot}.{t} {r}4, [{where}];
    st.global.{t} [%d23], {r}4;
    st.global.{t} [%d20], {r}5;""",
        a,
        b,
        old,
        red,
        shared=256,
    )
    want = [wrap(OPERATIONS[op](int(x), int(y)), kind) for x, y in zip(start, b, strict=True)]
    assert old.tolist() == start.tolist() and a.tolist() == want and red.tolist() == want


def test_lanes_of_one_address_follow_one_another() -> None:
    x, old = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    run(
        "atom.global.relaxed.gpu.add.u32 %r0, [%in0], 3; mad.wide.u32 %d0, %tid, 4, %in1; st.global.u32 [%d0], %r0;",
        x,
        old,
    )
    assert x[0] == 96 and sorted(old.tolist()) == list(range(0, 96, 3))


@pytest.mark.parametrize("order", ["relaxed.cta", "acquire.gpu", "release.sys", "acq_rel.cluster"])
def test_orders(order: str) -> None:
    x = np.zeros(1, np.uint32)
    run(f"atom.{order}.global.add.u32 %r0, [%in0], 1; atom.{order}.global.or.b32 _, [%in0], 64;", x)
    assert x[0] == 96


@pytest.mark.parametrize(("bits", "r"), [(16, "%h"), (32, "%r"), (64, "%d")])
def test_compare_and_swap(bits: int, r: str) -> None:
    dtype = np.dtype(f"u{bits // 8}")
    x, old = np.arange(32, dtype=dtype), np.zeros(32, dtype)
    size = bits // 8
    run(
        f"""
    mad.wide.u32 %d20, %tid, {size}, %in0; mad.wide.u32 %d21, %tid, {size}, %in1;
    and.b32 %r40, %tid, 0xFFFFFFFE; cvt.u{bits}.u32 {r}1, %r40; mov.b{bits} {r}2, 77;
    atom.global.cas.b{bits} {r}3, [%d20], {r}1, {r}2; st.global.b{bits} [%d21], {r}3;""",
        x,
        old,
    )
    assert old.tolist() == list(range(32)) and x.tolist() == [77 if i % 2 == 0 else i for i in range(32)]


def test_128_bits() -> None:
    x, out = aligned((32, 2), np.uint64), aligned((32, 4), np.uint64)
    x[:, 0], x[:, 1] = np.arange(32), 5
    run(
        """
    mad.wide.u32 %d20, %tid, 16, %in0; mad.wide.u32 %d21, %tid, 32, %in1; and.b32 %r0, %tid, 30; cvt.u64.u32 %d0, %r0;
    mov.b128 %q0, {%d0, 5}; mov.b128 %q1, {100, 200};
    atom.global.cas.b128 %q2, [%d20], %q0, %q1; mov.b128 {%d1, %d2}, %q2; st.global.v2.b64 [%d21], {%d1, %d2};
    mov.b128 %q0, {8, 9}; atom.global.exch.b128 %q2, [%d20], %q0; mov.b128 {%d1, %d2}, %q2;
    st.global.v2.b64 [%d21+16], {%d1, %d2};""",
        x,
        out,
    )
    for i in range(32):
        assert out[i].tolist() == [i, 5, *((100, 200) if i % 2 == 0 else (i, 5))]
    assert (x == [8, 9]).all()


FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


@pytest.mark.parametrize("t", list(FLOATS))
def test_float_add(t: str) -> None:
    rng = np.random.default_rng(3)
    dtype = FLOATS[t]
    a, b = rng.normal(size=32).astype(dtype), rng.normal(size=32).astype(dtype)
    start, old = a.copy(), np.zeros(32, dtype)
    n = np.dtype(dtype).itemsize
    r, noftz = {2: "%h", 4: "%r", 8: "%d"}[n], ".noftz" if n == 2 else ""
    bits = f"b{8 * n}"
    views = [v.view(f"u{n}") for v in (a, b, old)]
    run(
        f"""
    mad.wide.u32 %d20, %tid, {n}, %in0; mad.wide.u32 %d21, %tid, {n}, %in1; mad.wide.u32 %d22, %tid, {n}, %in2;
    ld.global.{bits} {r}1, [%d21]; atom.global.add{noftz}.{t} {r}2, [%d20], {r}1; st.global.{bits} [%d22], {r}2;
    red.global.add{noftz}.{t} [%d20], {r}1;""",
        *views,
    )
    assert (old == start).all()
    assert (a == ((start + b).astype(dtype) + b).astype(dtype)).all()


def test_f32_add_flushes_in_global_memory_only() -> None:
    """PTX ISA 9.7.13.5: red.add.f32 flushes subnormals in global memory, not in shared memory."""
    x, out = np.array([2.0**-130], np.float32), np.zeros(1, np.float32)
    run(
        """
    mov.b32 %r0, 0x00010000; ld.global.b32 %r1, [%in0]; st.shared.b32 [smem], %r1;
    red.global.add.f32 [%in0], %r0; red.shared.add.f32 [smem], %r0; ld.shared.b32 %r2, [smem];
    st.global.b32 [%in1], %r2;""",
        x,
        out,
        block=1,
        shared=16,
    )
    assert x[0] == 0 and out.view(np.uint32)[0] == int(np.float32(2.0**-130).view(np.uint32)) + 0x10000


VECTORS = [
    ("v2", "f32"),
    ("v4", "f32"),
    ("v2", "f16"),
    ("v4", "f16"),
    ("v8", "f16"),
    ("v2", "bf16"),
    ("v8", "bf16"),
    ("v2", "f16x2"),
    ("v4", "f16x2"),
    ("v4", "bf16x2"),
]


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize(("vector", "t"), [("", "f16x2"), ("", "bf16x2"), *VECTORS])
def test_packed_and_vectors(vector: str, t: str, op: str) -> None:
    if op != "add" and (t == "f32" or not vector):
        return
    rng = np.random.default_rng(4)
    dtype = FLOATS[t.removesuffix("x2")]
    n = int(vector[1:] or 1) if vector else 1
    elements = n * (2 if t.endswith("x2") else 1)
    a, b = (rng.normal(size=(32, elements)).astype(dtype) for _ in range(2))
    b[3, 0] = np.nan
    start, old = a.copy(), np.zeros_like(a)
    register = 4 if t in ("f32", "f16x2", "bf16x2") else 2
    r, bits = ("%r", "b32") if register == 4 else ("%h", "b16")
    names = lambda first: "{" + ", ".join(f"{r}{first + i}" for i in range(n)) + "}" if n > 1 else f"{r}{first}"
    bytes_ = n * register
    noftz = "" if t == "f32" else ".noftz"
    dot = f".{vector}" if vector else ""
    load = "".join(f"ld.global.{bits} {r}{8 + i}, [%d21+{register * i}];" for i in range(n))
    store = "".join(f"st.global.{bits} [%d22+{register * i}], {r}{20 + i};" for i in range(n))
    home = aligned(a.nbytes, np.uint8)
    home[:] = a.view(np.uint8).reshape(-1)
    run(
        f"""
    mad.wide.u32 %d20, %tid, {bytes_}, %in0; mad.wide.u32 %d21, %tid, {bytes_}, %in1;
    mad.wide.u32 %d22, %tid, {bytes_}, %in2;
    {load} atom.global.{op}{noftz}{dot}.{t} {names(20)}, [%d20], {names(8)}; {store}
    red.global.{op}{noftz}{dot}.{t} [%d20], {names(8)};""",
        home,
        b.view(np.uint8),
        old.view(np.uint8),
    )
    f = {"add": lambda x, y: (x + y).astype(dtype), "min": np.fmin, "max": np.fmax}[op]
    got = home.view(dtype).reshape(a.shape)
    assert (old == start).all()
    np.testing.assert_array_equal(got.astype(np.float64), f(f(start, b), b).astype(np.float64))


@pytest.mark.parametrize("threads", [1, 4])
def test_clusters_on_several_threads_lose_nothing(threads: int) -> None:
    x, y = np.zeros(1, np.uint64), np.zeros(2, np.float16)
    body = """
    mov.u64 %d0, 1; red.global.add.u64 [%in0], %d0;
    mov.b16 %h0, 0x1000; red.global.add.noftz.f16 [%in1], %h0;"""
    run(body, x, y.view(np.uint16), grid=64, block=32, threads=threads)
    assert x[0] == 2048 and float(y[0]) == 2048 * 2.0**-11
