"""mov, selections and comparisons, special registers, addresses of other CTAs (PTX ISA 9.7.6, 9.7.7, 9.7.9, 10)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from . import exact
from .snippet import per_lane, run
from .test_core_float import NAMES, UNSIGNED, codes
from .test_core_integer import DTYPES, edge

pytestmark = pytest.mark.simulator

ORDERED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def predicate(instruction: str, *inputs: np.ndarray, p: str = "%p0") -> list[int]:
    return per_lane(f"{instruction}; selp.b32 {{d}}, 1, 0, {p}", *inputs, out=np.uint32).tolist()


def bits_of(t: str) -> str:
    return t.replace("b", "u") if t.startswith("b") and not t.startswith("bf") else t


@pytest.mark.parametrize("t", ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"])
def test_setp_on_integers(t: str) -> None:
    a, b = edge(bits_of(t)), edge(bits_of(t))
    b[:20] = a[:20]
    names = dict(ORDERED) if t[0] != "b" else {n: ORDERED[n] for n in ("eq", "ne")}
    if t[0] == "u":
        names |= {n: ORDERED[m] for n, m in UNSIGNED_NAMES.items()}
    for name, f in names.items():
        assert predicate(f"setp.{name}.{t} %p0, {{0}}, {{1}}", a, b) == [
            int(f(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ], name


def as_float(t: str, code: int) -> float:
    f = NAMES[t]
    if exact.is_nan(f, code):
        return math.nan
    if exact.is_inf(f, code):
        return -math.inf if exact.is_negative(f, code) else math.inf
    return float(exact.value(f, code))


def compared(f: Callable[[float, float], bool], unordered: bool, a: float, b: float) -> bool:
    return unordered if math.isnan(a) or math.isnan(b) else f(a, b)


FLOAT_COMPARISONS = {
    **{name: partial(compared, f, False) for name, f in ORDERED.items()},
    **{name + "u": partial(compared, f, True) for name, f in ORDERED.items()},
    "num": lambda a, b: not math.isnan(a) and not math.isnan(b),
    "nan": lambda a, b: math.isnan(a) or math.isnan(b),
}


@pytest.mark.parametrize("t", list(NAMES))
def test_setp_on_floats(t: str) -> None:
    a, b = codes(NAMES[t], 120, 2)
    b[:40] = a[:40]
    x, y = ([as_float(t, int(v)) for v in c] for c in (a, b))
    for name, f in FLOAT_COMPARISONS.items():
        assert predicate(f"setp.{name}.{t} %p0, {{0}}, {{1}}", a, b) == [
            int(f(p, q)) for p, q in zip(x, y, strict=True)
        ], name
    if t in ("f32", "f16"):
        flat = [[as_float(t, exact.flushed(NAMES[t], int(v))) for v in c] for c in (a, b)]
        got = predicate(f"setp.lt.ftz.{t} %p0, {{0}}, {{1}}", a, b)
        assert got == [int(FLOAT_COMPARISONS["lt"](p, q)) for p, q in zip(*flat, strict=True)]


@pytest.mark.parametrize(("join", "negated"), list(itertools.product(["and", "or", "xor"], [False, True])))
def test_setp_with_a_boolean_and_a_complement(join: str, negated: bool) -> None:
    a, b, c = edge("s32"), edge("s32"), edge("s32")
    f = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[join]
    first = (a < b).astype(int)
    third = (c > 0).astype(int) ^ negated
    body = f"setp.gt.s32 %p1, {{2}}, 0; setp.lt.{join}.s32 %p0|%p2, {{0}}, {{1}}, {'!' * negated}%p1"
    assert predicate(body, a, b, c) == f(first, third).tolist()
    assert predicate(body, a, b, c, p="%p2") == f(1 - first, third).tolist()


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_setp_on_packed_halves(t: str) -> None:
    low, high = codes(NAMES[t], 64, 2), codes(NAMES[t], 64, 2)
    a, b = (h.astype(np.uint32) << 16 | x for x, h in zip(low, high, strict=True))
    for p, pair in (("%p0", low), ("%p1", high)):
        want = [
            int(FLOAT_COMPARISONS["le"](as_float(t, int(x)), as_float(t, int(y)))) for x, y in zip(*pair, strict=True)
        ]
        assert predicate(f"setp.le.{t}x2 %p0|%p1, {{0}}, {{1}}", a, b, p=p) == want
    got = per_lane(f"set.le.{t}x2.{t}x2 {{d}}, {{0}}, {{1}}", a, b, out=np.uint32)
    whole = per_lane(f"set.le.u32.{t}x2 {{d}}, {{0}}, {{1}}", a, b, out=np.uint32)
    one = 0x3C00 if t == "f16" else 0x3F80
    for shift, pair in ((0, low), (16, high)):
        want = [FLOAT_COMPARISONS["le"](as_float(t, int(x)), as_float(t, int(y))) for x, y in zip(*pair, strict=True)]
        assert ((got >> shift) & 0xFFFF).tolist() == [one * w for w in want]
        assert ((whole >> shift) & 0xFFFF).tolist() == [0xFFFF * w for w in want]


@pytest.mark.parametrize(
    ("to", "yes"),
    [("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000), ("f16", 0x3C00), ("u16", 0xFFFF), ("bf16", 0x3F80)],
)
def test_set(to: str, yes: int) -> None:
    a, b = edge("s32"), edge("s32")
    dtype = np.uint16 if to in ("f16", "u16", "bf16") else np.uint32
    assert per_lane(f"set.gt.{to}.s32 {{d}}, {{0}}, {{1}}", a, b, out=dtype).tolist() == [yes * bool(x) for x in a > b]
    got = per_lane(f"setp.ne.s32 %p0, {{0}}, 0; set.gt.and.{to}.s32 {{d}}, {{0}}, {{1}}, %p0", a, b, out=dtype)
    assert got.tolist() == [yes * bool(x) for x in (a > b) & (a != 0)]


@pytest.mark.parametrize("t", ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"])
def test_selp_and_slct(t: str) -> None:
    size = int(t[1:]) // 8
    dtype = np.dtype(f"u{size}")
    a, b, c = edge(f"u{size * 8}"), edge(f"u{size * 8}"), edge("s32")
    assert (
        per_lane(f"setp.gt.s32 %p0, {{2}}, 5; selp.{t} {{d}}, {{0}}, {{1}}, %p0", a, b, c, out=dtype).tolist()
        == np.where(c > 5, a, b).tolist()
    )
    if t in ("s16", "f32", "b32", "u64"):
        assert (
            per_lane(f"slct.{t}.s32 {{d}}, {{0}}, {{1}}, {{2}}", a, b, c, out=dtype).tolist()
            == np.where(c >= 0, a, b).tolist()
        )
        z = np.array([1.0, -1.0, 0.0, -0.0, np.nan, -1e-40, 1e-40, np.inf] * 12, np.float32)
        assert (
            per_lane(f"slct.{t}.f32 {{d}}, {{0}}, {{1}}, {{2}}", a, b, z, out=dtype).tolist()
            == np.where(z >= 0, a, b).tolist()
        )
        flat = np.where(np.abs(z) < 2.0**-126, 0, z)
        assert (
            per_lane(f"slct.ftz.{t}.f32 {{d}}, {{0}}, {{1}}, {{2}}", a, b, z, out=dtype).tolist()
            == np.where(flat >= 0, a, b).tolist()
        )


@pytest.mark.parametrize(("whole", "part"), [(32, 16), (64, 32), (64, 16), (32, 8), (16, 8)])
def test_mov_packs_and_unpacks(whole: int, part: int) -> None:
    x = edge(f"u{whole}")
    n = whole // part
    bank = {8: "%h", 16: "%h", 32: "%r"}[part]
    names = ", ".join(f"{bank}{i}" for i in range(n))
    assert (
        per_lane(f"mov.b{whole} {{{{{names}}}}}, {{0}}; mov.b{whole} {{d}}, {{{{{names}}}}}", x, out=x.dtype).tolist()
        == x.tolist()
    )
    for i in range(n):
        got = per_lane(
            f"mov.b{whole} {{{{{names}}}}}, {{0}}; mov.b{max(part, 16)} {{d}}, {bank}{i}",
            x,
            out=np.dtype(f"u{max(part, 16) // 8}"),
        )
        assert got.tolist() == [int(v) >> i * part & (1 << part) - 1 for v in x]
    rest = ", ".join(["_"] * (n - 1))
    got = per_lane(
        f"mov.b{whole} {{{{{rest}, {bank}0}}}}, {{0}}; mov.b{max(part, 16)} {{d}}, {bank}0",
        x,
        out=np.dtype(f"u{max(part, 16) // 8}"),
    )
    assert got.tolist() == [int(v) >> (n - 1) * part for v in x]


def test_mov_of_128_bits_and_predicates() -> None:
    x = edge("u64")
    assert (
        per_lane("mov.b128 %q0, {{{0}, 7}}; mov.b128 %q1, %q0; mov.b128 {{{d}, %d9}}, %q1", x, out=np.uint64).tolist()
        == x.tolist()
    )
    assert per_lane("mov.b128 %q0, {{7, {0}}}; mov.b128 {{%d9, {d}}}, %q0", x, out=np.uint64).tolist() == x.tolist()
    a = edge("s32")
    body = """setp.gt.s32 %p1, {0}, 0; mov.pred %p0, !%p1; not.pred %p2, %p0; and.pred %p2, %p2, %p1;
    or.pred %p2, %p2, %p0; xor.pred %p0, %p2, %p1"""
    assert predicate(body, a) == [int(v <= 0) for v in a]


def test_special_registers() -> None:
    """A grid of 2 x 2 x 2 CTAs in clusters of 2 x 1 x 1, blocks of 8 x 4 x 2 threads."""
    names = [
        "%tid.x",
        "%tid.y",
        "%tid.z",
        "%ntid.x",
        "%ntid.y",
        "%ntid.z",
        "%ctaid.x",
        "%ctaid.y",
        "%ctaid.z",
        "%nctaid.x",
        "%nctaid.y",
        "%nctaid.z",
    ]
    names += [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%clusterid.x",
        "%clusterid.y",
        "%clusterid.z",
        "%nclusterid.x",
        "%nclusterid.y",
        "%nclusterid.z",
    ]
    names += ["%cluster_ctaid.x", "%cluster_nctaid.x", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"]
    names += [
        "%lanemask_eq",
        "%lanemask_le",
        "%lanemask_lt",
        "%lanemask_ge",
        "%lanemask_gt",
        "%dynamic_smem_size",
        "%nsmid",
    ]
    out = np.zeros((8, 64, len(names)), np.uint32)
    read = "".join(
        f"mov.u32 %r1, {n}; st.global.u32 [%d0+{4 * i}], %r1;"
        for i, n in enumerate(names)
        if n != "%is_explicit_cluster"
    )
    read += f"mov.pred %p0, %p0; st.global.u32 [%d0+{4 * names.index('%is_explicit_cluster')}], %is_explicit_cluster;"
    read = read.replace("mov.pred %p0, %p0;", "")
    run(
        f"""
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
    mad.lo.u32 %r3, %r4, 2, %r3; mad.lo.u32 %r2, %r3, 2, %r2;
    mov.u32 %r5, %tid.y; mov.u32 %r6, %tid.z; mad.lo.u32 %r5, %r6, 4, %r5; mad.lo.u32 %r5, %r5, 8, %tid;
    mad.lo.u32 %r2, %r2, 64, %r5; mad.wide.u32 %d0, %r2, {4 * len(names)}, %in0;
    {read}""",
        out,
        grid=(2, 2, 2),
        block=(8, 4, 2),
        cluster=(2, 1, 1),
        shared=96,
        processors=77,
    )
    for cta, thread in itertools.product(range(8), range(64)):
        x, y, z, lane = cta % 2, cta // 2 % 2, cta // 4, thread % 32
        want = [thread % 8, thread // 8 % 4, thread // 32, 8, 4, 2, x, y, z, 2, 2, 2]
        want += [lane, thread // 32, 2, 0, y, z, 1, 2, 2, x, 2, x, 2, 1]
        want += [
            1 << lane,
            (2 << lane) - 1,
            (1 << lane) - 1,
            0xFFFFFFFF << lane & 0xFFFFFFFF,
            0xFFFFFFFF << lane + 1 & 0xFFFFFFFF,
            96,
            77,
        ]
        assert out[cta, thread].tolist() == want


def test_clocks_go_forward() -> None:
    out = np.zeros(4, np.uint64)
    run(
        """
    mov.u64 %d0, %clock64; mov.u64 %d1, %globaltimer; mov.u64 %d2, %clock64; mov.u32 %r0, %clock;
    mov.u32 %r1, %clock_hi;
    st.global.u64 [%in0], %d0; st.global.u64 [%in0+8], %d1; st.global.u64 [%in0+16], %d2; cvt.u64.u32 %d3, %r0;
    st.global.u64 [%in0+24], %d3;""",
        out,
    )
    assert (np.diff(out.astype(np.int64)) > 0).all()


def test_mapa_getctarank_isspacep() -> None:
    """Each CTA of a cluster of four writes its rank into the shared memory of its neighbour."""
    out = np.zeros((4, 8), np.uint32)
    run(
        """
    mov.u32 %r0, %cluster_ctarank; add.u32 %r1, %r0, 1; and.b32 %r1, %r1, 3;
    mov.u32 %r2, smem; mapa.shared::cluster.u32 %r3, %r2, %r1;
    st.shared::cluster.u32 [%r3+16], %r0;
    cvt.u64.u32 %d0, %r2; cvta.shared.u64 %d1, %d0; mapa.u64 %d2, %d1, %r1; add.u32 %r4, %r0, 100; st.u32 [%d2+20], %r4;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.u32 %r5, [smem+16]; ld.shared.u32 %r6, [smem+20];
    getctarank.shared::cluster.u32 %r7, %r3; getctarank.u64 %r8, %d2;
    isspacep.shared %p0, %d2; isspacep.shared::cluster %p1, %d2; isspacep.global %p2, %in0; isspacep.local %p3, %d2;
    isspacep.shared::cta %p4, %d1;
    selp.u32 %r9, 1, 0, %p0; selp.u32 %r10, 2, 0, %p1; selp.u32 %r11, 4, 0, %p2; selp.u32 %r12, 8, 0, %p3;
    selp.u32 %r13, 16, 0, %p4;
    or.b32 %r9, %r9, %r10; or.b32 %r9, %r9, %r11; or.b32 %r9, %r9, %r12; or.b32 %r9, %r9, %r13;
    mad.wide.u32 %d3, %r0, 32, %in0;
    st.global.v4.u32 [%d3], {%r5, %r6, %r7, %r8}; st.global.u32 [%d3+16], %r9;""",
        out,
        grid=4,
        cluster=4,
        shared=64,
    )
    for rank in range(4):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        assert out[rank].tolist() == [before, 100 + before, after, after, 2 + 4 + 16, 0, 0, 0]


def test_dtypes_cover_the_registers() -> None:
    assert {d.itemsize for d in DTYPES.values()} >= {2, 4, 8} and set(UNSIGNED) == {16, 32, 64}
