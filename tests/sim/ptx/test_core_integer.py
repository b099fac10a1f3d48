"""Integer instructions of PTX ISA 9.7.1, 9.7.2 and 9.7.8, compared with Python's integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .snippet import per_lane, run

pytestmark = pytest.mark.simulator

DTYPES = {f"{k}{n}": np.dtype(f"{c}{n // 8}") for k, c in (("u", "u"), ("s", "i"), ("b", "u")) for n in (8, 16, 32, 64)}
rng = np.random.default_rng(5)


def limits(t: str) -> tuple[int, int]:
    info = np.iinfo(DTYPES[t])
    return int(info.min), int(info.max)


def edge(t: str, n: int = 96) -> np.ndarray:
    """Interesting and random values of a type."""
    low, high = limits(t)
    special = [low, low + 1, high, high - 1, 0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, high // 2, low // 2, 255, 256]
    special = [v for v in special if low <= v <= high] + ([-1, -2, -3, -32] if low < 0 else [])
    noise = [int(x) for x in rng.integers(low, high, n - len(special), DTYPES[t], endpoint=True)]
    return rng.permutation(np.array(special + noise, DTYPES[t]))


def wrap(v: int, t: str) -> int:
    low, high = limits(t)
    v &= (1 << DTYPES[t].itemsize * 8) - 1
    return v - (1 << DTYPES[t].itemsize * 8) if v > high else v


def clamp(v: int, t: str) -> int:
    low, high = limits(t)
    return min(max(v, low), high)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def check(instruction: str, expected: Any, *inputs: np.ndarray, out: str) -> None:
    got = per_lane(instruction, *inputs, out=DTYPES[out])
    want = np.array([wrap(expected(*(int(x) for x in row)), out) for row in zip(*inputs, strict=True)], DTYPES[out])
    wrong = np.nonzero(got != want)[0]
    assert not len(wrong), [(tuple(int(x[i]) for x in inputs), int(got[i]), int(want[i])) for i in wrong[:5]]


INTEGERS = ["u16", "s16", "u32", "s32", "u64", "s64"]
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("t", INTEGERS)
@pytest.mark.parametrize("name", list(BINARY))
def test_binary(name: str, t: str) -> None:
    check(f"{name}.{t} {{d}}, {{0}}, {{1}}", BINARY[name], edge(t), edge(t), out=t)


@pytest.mark.parametrize("t", INTEGERS)
def test_division_truncates_and_never_traps(t: str) -> None:
    a, b = edge(t), edge(t)
    check(f"div.{t} {{d}}, {{0}}, {{1}}", lambda x, y: quotient(x, y) if y else -1, a, b, out=t)
    check(f"rem.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x - quotient(x, y) * y if y else x, a, b, out=t)


@pytest.mark.parametrize("t", INTEGERS)
def test_high_and_wide_products(t: str) -> None:
    bits = DTYPES[t].itemsize * 8
    a, b, c = edge(t), edge(t), edge(t)
    check(f"mul.hi.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x * y >> bits, a, b, out=t)
    check(f"mad.lo.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, z: x * y + z, a, b, c, out=t)
    check(f"mad.hi.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, z: (x * y >> bits) + z, a, b, c, out=t)
    if bits < 64:
        wide = f"{t[0]}{2 * bits}"
        check(f"mul.wide.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x * y, a, b, out=wide)
        check(f"mad.wide.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, z: x * y + z, a, b, edge(wide), out=wide)


def test_saturation_of_s32() -> None:
    a, b, c = edge("s32"), edge("s32"), edge("s32")
    check("add.sat.s32 {d}, {0}, {1}", lambda x, y: clamp(x + y, "s32"), a, b, out="s32")
    check("sub.sat.s32 {d}, {0}, {1}", lambda x, y: clamp(x - y, "s32"), a, b, out="s32")
    check("mad.hi.sat.s32 {d}, {0}, {1}, {2}", lambda x, y, z: clamp((x * y >> 32) + z, "s32"), a, b, c, out="s32")


def test_relu_of_min_and_max() -> None:
    a, b = edge("s32"), edge("s32")
    check("min.relu.s32 {d}, {0}, {1}", lambda x, y: max(min(x, y), 0), a, b, out="s32")
    check("max.relu.s32 {d}, {0}, {1}", lambda x, y: max(x, y, 0), a, b, out="s32")


@pytest.mark.parametrize(
    ("name", "t", "f"),
    [
        ("add", "u16", lambda a, b: a + b),
        ("add", "s16", lambda a, b: a + b),
        ("min", "u16", min),
        ("max", "u16", max),
        ("min", "s16", min),
        ("max", "s16", max),
        ("min.relu", "s16", lambda a, b: max(min(a, b), 0)),
        ("max.relu", "s16", lambda a, b: max(a, b, 0)),
    ],
)
def test_packed_halves(name: str, t: str, f: Any) -> None:
    low, high = [edge(t) for _ in range(2)], [edge(t) for _ in range(2)]
    a, b = ((h.view("u2").astype("u4") << 16) | x.view("u2") for x, h in zip(low, high, strict=True))
    root, _, rest = name.partition(".")
    got = per_lane(f"{root}{'.' + rest if rest else ''}.{t}x2 {{d}}, {{0}}, {{1}}", a, b, out=np.uint32)
    want = [
        (wrap(f(int(h), int(k)), "u16") << 16) | wrap(f(int(x), int(y)), "u16")
        for x, y, h, k in zip(*low, *high, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("t", ["s16", "s32", "s64"])
def test_sign(t: str) -> None:
    check(f"neg.{t} {{d}}, {{0}}", lambda x: -x, edge(t), out=t)
    check(f"abs.{t} {{d}}, {{0}}", abs, edge(t), out=t)


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_logic(t: str) -> None:
    a, b = edge(t), edge(t)
    check(f"and.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x & y, a, b, out=t)
    check(f"or.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x | y, a, b, out=t)
    check(f"xor.{t} {{d}}, {{0}}, {{1}}", lambda x, y: x ^ y, a, b, out=t)
    check(f"not.{t} {{d}}, {{0}}", lambda x: ~x, a, out=t)
    check(f"cnot.{t} {{d}}, {{0}}", lambda x: int(x == 0), a, out=t)


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_shifts_clamp_their_amount(t: str) -> None:
    bits = DTYPES[t].itemsize * 8
    a, n = edge(t), rng.integers(0, 80, 96, np.uint32)
    n[0] = 0xFFFFFFFF
    check(f"shl.{t} {{d}}, {{0}}, {{1}}", lambda x, s: x << s if s < bits else 0, a, n, out=t)
    check(f"shr.{t} {{d}}, {{0}}, {{1}}", lambda x, s: x >> min(s, bits), a, n, out=t)
    signed, unsigned = f"s{bits}", f"u{bits}"
    check(f"shr.{unsigned} {{d}}, {{0}}, {{1}}", lambda x, s: x >> min(s, bits), a, n, out=unsigned)
    check(
        f"shr.{signed} {{d}}, {{0}}, {{1}}", lambda x, s: x >> min(s, bits - 1), a.view(DTYPES[signed]), n, out=signed
    )


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(mode: str) -> None:
    a, b, n = edge("u32"), edge("u32"), rng.integers(0, 70, 96, np.uint32)
    amount = lambda c: min(c, 32) if mode == "clamp" else c & 31
    both = lambda x, y: y << 32 | x
    check(
        f"shf.l.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}}",
        lambda x, y, c: both(x, y) << amount(c) >> 32,
        a,
        b,
        n,
        out="u32",
    )
    check(f"shf.r.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, c: both(x, y) >> amount(c), a, b, n, out="u32")


@pytest.mark.parametrize("t", ["b32", "b64"])
def test_bit_counts(t: str) -> None:
    bits, a = DTYPES[t].itemsize * 8, edge(t)
    check(f"popc.{t} {{d}}, {{0}}", lambda x: x.bit_count(), a, out="u32")
    check(f"clz.{t} {{d}}, {{0}}", lambda x: bits - x.bit_length(), a, out="u32")
    check(f"brev.{t} {{d}}, {{0}}", lambda x: int(f"{x:0{bits}b}"[::-1], 2), a, out=t)


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfind(t: str) -> None:
    bits = DTYPES[t].itemsize * 8
    found = lambda x: (~x if x < 0 else x).bit_length() - 1
    check(f"bfind.{t} {{d}}, {{0}}", found, edge(t), out="u32")
    check(
        f"bfind.shiftamt.{t} {{d}}, {{0}}", lambda x: bits - 1 - found(x) if found(x) >= 0 else -1, edge(t), out="u32"
    )


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfe(t: str) -> None:
    bits = DTYPES[t].itemsize * 8

    def extract(a: int, b: int, c: int) -> int:  # bit by bit, as the manual defines it
        pos, length = b & 255, c & 255
        u = a & ((1 << bits) - 1)
        sign = 0 if t[0] == "u" or length == 0 else u >> min(pos + length - 1, bits - 1) & 1
        return sum((u >> pos + i & 1 if i < length and pos + i < bits else sign) << i for i in range(bits))

    check(
        f"bfe.{t} {{d}}, {{0}}, {{1}}, {{2}}",
        extract,
        edge(t),
        rng.integers(0, 300, 96, np.uint32),
        rng.integers(0, 80, 96, np.uint32),
        out=t,
    )


@pytest.mark.parametrize("t", ["b32", "b64"])
def test_bfi(t: str) -> None:
    bits = DTYPES[t].itemsize * 8

    def insert(a: int, b: int, c: int, d: int) -> int:
        pos, length = c & 255, d & 255
        for i in range(length):
            if pos + i < bits:
                b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
        return b

    check(
        f"bfi.{t} {{d}}, {{0}}, {{1}}, {{2}}, {{3}}",
        insert,
        edge(t),
        edge(t),
        rng.integers(0, 70, 96, np.uint32),
        rng.integers(0, 70, 96, np.uint32),
        out=t,
    )


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bmsk_and_szext(mode: str) -> None:
    small = rng.integers(0, 40, 96, np.uint32)
    width = rng.integers(0, 33 if mode == "clamp" else 32, 96, np.uint32)

    def mask(a: int, b: int) -> int:
        if mode == "clamp" and a >= 32:
            return 0
        width = min(b, 32) if mode == "clamp" else b & 31
        return ((1 << width) - 1) << (a & 31)

    check(f"bmsk.{mode}.b32 {{d}}, {{0}}, {{1}}", mask, small, width, out="u32")

    def extend(signed: bool) -> Any:
        def f(a: int, n: int) -> int:
            if mode == "clamp" and n >= 32:
                return a
            n &= 31
            low = a & ((1 << n) - 1)
            return low - (1 << n) if signed and n and low >> n - 1 else low

        return f

    check(f"szext.{mode}.u32 {{d}}, {{0}}, {{1}}", extend(False), edge("u32"), small, out="u32")
    check(f"szext.{mode}.s32 {{d}}, {{0}}, {{1}}", extend(True), edge("u32"), small, out="u32")


def test_fns() -> None:
    def nth(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else -1
        order = range(base, 32) if offset > 0 else range(base, -1, -1)
        hits = [i for i in order if mask >> i & 1]
        return hits[abs(offset) - 1] if len(hits) >= abs(offset) else -1

    check(
        "fns.b32 {d}, {0}, {1}, {2}",
        nth,
        edge("u32"),
        rng.integers(0, 32, 96, np.uint32),
        rng.integers(-20, 20, 96).astype(np.int32),
        out="u32",
    )


# PTX ISA 9.7.9.7: source byte numbers, most significant first, by the two low bits of c.
PERMUTES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


def test_prmt() -> None:
    def general(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        pick = lambda s: (0xFF if source[s & 7] & 0x80 else 0) if s & 8 else source[s & 7]
        return int.from_bytes(bytes(pick(c >> 4 * i & 15) for i in range(4)), "little")

    check("prmt.b32 {d}, {0}, {1}, {2}", general, edge("u32"), edge("u32"), edge("u32"), out="u32")


@pytest.mark.parametrize("mode", list(PERMUTES))
def test_prmt_modes(mode: str) -> None:
    def special(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(source[int(n)] for n in PERMUTES[mode][c & 3]), "big")

    check(f"prmt.b32.{mode} {{d}}, {{0}}, {{1}}, {{2}}", special, edge("u32"), edge("u32"), edge("u32"), out="u32")


@pytest.mark.parametrize("table", [0x00, 0x80, 0x40, 0x1A, 0xFE, 0xFF, 0x96, 0xCA, 0xE8])
def test_lop3(table: int) -> None:
    def f(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    check(f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table}", f, edge("u32"), edge("u32"), edge("u32"), out="u32")


@pytest.mark.parametrize("join", ["and", "or"])
def test_lop3_with_a_predicate(join: str) -> None:
    a, b = np.arange(32, dtype=np.uint32) % 3, np.arange(32, dtype=np.uint32) % 2
    body = f"""
    mad.wide.u32 %d0, %tid, 4, %in0; ld.global.u32 %r0, [%d0];
    mad.wide.u32 %d1, %tid, 4, %in1; ld.global.u32 %r1, [%d1];
    setp.ne.u32 %p1, %r1, 0;
    lop3.{join}.b32 %r2|%p0, %r0, %r0, %r0, 0x80, %p1;
    selp.u32 %r3, 1, 0, %p0; st.global.u32 [%d0], %r3;
    lop3.{join}.b32 _|%p2, %r0, %r0, %r0, 0x80, !%p1;
    selp.u32 %r3, 1, 0, %p2; st.global.u32 [%d1], %r3;"""
    x, y = a.copy(), b.copy()
    run(body, x, y)
    op = np.logical_and if join == "and" else np.logical_or
    assert (x == op(a != 0, b != 0)).all()
    assert (y == op(a != 0, b == 0)).all()


@pytest.mark.parametrize("t", INTEGERS)
def test_sad(t: str) -> None:
    check(f"sad.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda a, b, c: c + abs(a - b), edge(t), edge(t), edge(t), out=t)


def parts(v: int, bits: int, signed: bool) -> list[int]:
    out = [v >> i & ((1 << bits) - 1) for i in range(0, 32, bits)]
    return [x - (1 << bits) if signed and x >> bits - 1 else x for x in out]


@pytest.mark.parametrize("a", ["u32", "s32"])
@pytest.mark.parametrize("b", ["u32", "s32"])
def test_dot_products(a: str, b: str) -> None:
    x, y, z = edge("u32"), edge("u32"), edge("u32")
    dot = lambda p, q, c: c + sum(i * j for i, j in zip(p, q, strict=False))
    check(
        f"dp4a.{a}.{b} {{d}}, {{0}}, {{1}}, {{2}}",
        lambda p, q, c: dot(parts(p, 8, a == "s32"), parts(q, 8, b == "s32"), c),
        x,
        y,
        z,
        out="u32",
    )
    for mode, first in (("lo", 0), ("hi", 2)):
        f = lambda p, q, c, first=first: dot(parts(p, 16, a == "s32"), parts(q, 8, b == "s32")[first:], c)
        check(f"dp2a.{mode}.{a}.{b} {{d}}, {{0}}, {{1}}, {{2}}", f, x, y, z, out="u32")


@pytest.mark.parametrize("t", ["u32", "s32"])
def test_24_bit_products(t: str) -> None:
    low = lambda v: (v & 0xFFFFFF) - (1 << 24 if t == "s32" and v >> 23 & 1 else 0)
    a, b, c = edge(t), edge(t), edge(t)
    check(f"mul24.lo.{t} {{d}}, {{0}}, {{1}}", lambda x, y: low(x) * low(y), a, b, out=t)
    check(f"mul24.hi.{t} {{d}}, {{0}}, {{1}}", lambda x, y: low(x) * low(y) >> 16, a, b, out=t)
    check(f"mad24.lo.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, z: low(x) * low(y) + z, a, b, c, out=t)
    check(f"mad24.hi.{t} {{d}}, {{0}}, {{1}}, {{2}}", lambda x, y, z: (low(x) * low(y) >> 16) + z, a, b, c, out=t)
    if t == "s32":
        f = lambda x, y, z: clamp(wrap(low(x) * low(y) >> 16, "s32") + z, "s32")
        check("mad24.hi.sat.s32 {d}, {0}, {1}, {2}", f, a, b, c, out=t)


@pytest.mark.parametrize("t", ["u32", "u64"])
def test_carries_run_through_several_words(t: str) -> None:
    """x + y, x - y and the high word of x * y + z * 2^bits on two words, the manual's way (PTX ISA 9.7.2)."""
    bits, letter = DTYPES[t].itemsize * 8, "r" if t == "u32" else "d"
    words = [edge(t) for _ in range(4)]
    n = len(words[0])
    outs = [np.zeros(n, DTYPES[t]) for _ in range(6)]
    names = [f"%{letter}{i}" for i in range(4)]
    size = DTYPES[t].itemsize
    loads = "".join(
        f"mad.wide.u32 %d{20 + i}, %tid, {size}, %in{i}; ld.global.b{bits} {names[i]}, [%d{20 + i}];" for i in range(4)
    )
    stores = "".join(
        f"mad.wide.u32 %d20, %tid, {size}, %in{4 + i}; st.global.b{bits} [%d20], %{letter}{8 + i};" for i in range(6)
    )
    run(
        loads
        + f"""
        add.cc.{t} %{letter}8, %{letter}0, %{letter}2;
        addc.{t} %{letter}9, %{letter}1, %{letter}3;
        sub.cc.{t} %{letter}10, %{letter}0, %{letter}2;
        subc.{t} %{letter}11, %{letter}1, %{letter}3;
        mad.lo.cc.{t} %{letter}12, %{letter}0, %{letter}2, %{letter}1;
        madc.hi.{t} %{letter}13, %{letter}0, %{letter}2, %{letter}3;"""
        + stores,
        *words,
        *outs,
        block=n,
    )
    for i in range(n):
        a, b, c, d = (int(w[i]) for w in words)
        x, y, mask = b << bits | a, d << bits | c, (1 << 2 * bits) - 1
        total, difference, product = (x + y) & mask, (x - y) & mask, (a * c + (d << bits | b)) & mask
        got = [int(o[i]) for o in outs]
        assert got == [
            total % (1 << bits),
            total >> bits,
            difference % (1 << bits),
            difference >> bits,
            product % (1 << bits),
            product >> bits,
        ]


def test_inactive_lanes_keep_their_value() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """
    setp.lt.u32 %p0, %tid, 7;
    mov.u32 %r0, 5;
    @%p0 add.u32 %r0, %r0, 37;
    @!%p0 shl.b32 %r0, %r0, 2;
    mad.wide.u32 %d0, %tid, 4, %in0; st.global.u32 [%d0], %r0;""",
        out,
    )
    assert (out == np.where(np.arange(32) < 7, 42, 20)).all()
