"""Floating-point instructions of PTX ISA 9.7.3, 9.7.4 and 9.7.5, compared with exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from . import exact
from .exact import BF16, F16, F32, F64, Format
from .snippet import per_lane, run

pytestmark = pytest.mark.simulator

NAMES = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
NAN = {F16: 0x7FFF, BF16: 0x7FFF, F32: 0x7FFFFFFF}  # canonical; f64 keeps payloads, any NaN is right there
MODES = ["rn", "rz", "rm", "rp"]
rng = np.random.default_rng(6)


def specials(f: Format) -> list[int]:
    """Zeros, subnormals, ends of the normal range, one and its neighbours, infinities, NaNs; both signs."""
    one = ((1 << (f[0] - 1)) - 1) << f[1]
    normal = 1 << f[1]
    positive = [
        0,
        1,
        2,
        normal - 1,
        normal,
        normal + 1,
        one - 1,
        one,
        one + 1,
        one + normal,
        one - normal,
        exact.infinity(f) - 1,
    ]
    positive += [exact.infinity(f), exact.infinity(f) + 1, exact.sign_bit(f) - 1]
    return positive + [p | exact.sign_bit(f) for p in positive]


def codes(f: Format, n: int, arity: int) -> list[np.ndarray]:
    """``arity`` arrays: special combinations, random bits, and operands of like size (where sums cancel and round)."""
    dtype, width = UNSIGNED[exact.WIDTH[f]], exact.WIDTH[f]
    grid = list(itertools.product(specials(f), repeat=arity))
    chosen = [grid[i] for i in rng.permutation(len(grid))[:n]]
    wild = rng.integers(0, (1 << width) - 1, (n, arity), np.uint64, endpoint=True)
    near = rng.integers(0, 3 << f[1], (n, arity), np.uint64) + (((1 << (f[0] - 1)) - 2) << f[1])
    near |= rng.integers(0, 2, (n, arity), np.uint64) << np.uint64(width - 1)
    near[::2, -1] = (near[::2, -1] - (np.uint64(12) << np.uint64(f[1]))) & np.uint64((1 << width) - 1)
    rows = np.concatenate([np.array(chosen, np.uint64), wild, near]).astype(dtype)
    return [np.ascontiguousarray(rows[:, i]) for i in range(arity)]


def compare(f: Format, got: np.ndarray, want: list[int | None], inputs: list[np.ndarray]) -> None:
    wrong = []
    for i, w in enumerate(want):
        g = int(got[i])
        same = exact.is_nan(f, g) if w is None and f is F64 else g == (NAN[f] if w is None else w)
        if not same:
            wrong.append(([hex(int(x[i])) for x in inputs], hex(g), w if w is None else hex(w)))
    assert not wrong, (len(wrong), wrong[:5])


def check(
    instruction: str, f: Format, oracle: Callable[..., int | None], arity: int, n: int = 160, **options: Any
) -> None:
    inputs = codes(f, n, arity)
    got = per_lane(instruction, *inputs, out=UNSIGNED[exact.WIDTH[f]], **options)
    compare(f, got, [oracle(*(int(v) for v in row)) for row in zip(*inputs, strict=True)], inputs)


def subtracted(f: Format, a: int, b: int, mode: str = "rn") -> int | None:
    return exact.add(f, a, b ^ exact.sign_bit(f), mode)


ORACLES: dict[str, tuple[Callable[..., int | None], int]] = {
    "add": (exact.add, 2),
    "sub": (subtracted, 2),
    "mul": (exact.mul, 2),
    "fma": (exact.fma, 3),
}


def operands(n: int) -> str:
    return "{d}, " + ", ".join(f"{{{i}}}" for i in range(n))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize("name", list(ORACLES))
def test_sums_and_products(name: str, t: str, mode: str) -> None:
    f = NAMES[t]
    oracle, arity = ORACLES[name]
    check(f"{name}.{mode}.{t} {operands(arity)}", f, lambda *x: oracle(f, *x, mode), arity)
    if name == "fma":
        check(f"mad.{mode}.{t} {operands(arity)}", f, lambda *x: oracle(f, *x, mode), arity, n=32)
    elif mode == "rn":
        check(f"{name}.{t} {operands(arity)}", f, lambda *x: oracle(f, *x), arity, n=32)


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("name", list(ORACLES))
def test_half_precision(name: str, t: str) -> None:
    f = NAMES[t]
    oracle, arity = ORACLES[name]
    check(f"{name}.rn.{t} {operands(arity)}", f, lambda *x: oracle(f, *x), arity, n=320)


def flushing(f: Format, oracle: Callable[..., int | None]) -> Callable[..., int | None]:
    def g(*x: int) -> int | None:
        r = oracle(f, *(exact.flushed(f, v) for v in x))
        return None if r is None else exact.flushed(f, r)

    return g


@pytest.mark.parametrize("t", ["f32", "f16"])
@pytest.mark.parametrize("name", list(ORACLES))
def test_ftz(name: str, t: str) -> None:
    f = NAMES[t]
    oracle, arity = ORACLES[name]
    check(f"{name}.rn.ftz.{t} {operands(arity)}", f, flushing(f, oracle), arity)


def saturated(f: Format, r: int | None) -> int:
    """[0, 1], NaN is +0."""
    if r is None or exact.is_nan(f, r) or exact.is_negative(f, r):
        return 0
    return min(r, ((1 << (f[0] - 1)) - 1) << f[1])


@pytest.mark.parametrize("t", ["f32", "f16"])
@pytest.mark.parametrize("name", list(ORACLES))
def test_sat(name: str, t: str) -> None:
    f = NAMES[t]
    oracle, arity = ORACLES[name]
    check(f"{name}.rn.sat.{t} {operands(arity)}", f, lambda *x: saturated(f, oracle(f, *x)), arity)


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_relu_of_fma(t: str) -> None:
    f = NAMES[t]

    def relu(*x: int) -> int | None:
        r = exact.fma(f, *x)
        return r if r is None else 0 if exact.is_negative(f, r) else r

    check(f"fma.rn.relu.{t} {operands(3)}", f, relu, 3)


def packed(f: Format, n: int, arity: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Low halves, high halves, and both in one register."""
    low, high = codes(f, n, arity), codes(f, n, arity)
    wide = UNSIGNED[2 * exact.WIDTH[f]]
    both = [h.astype(wide) << wide(exact.WIDTH[f]) | x.astype(wide) for x, h in zip(low, high, strict=True)]
    return low, high, both


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(ORACLES))
def test_f32x2(name: str, mode: str) -> None:
    oracle, arity = ORACLES[name]
    low, high, both = packed(F32, 96, arity)
    for suffix, f in (
        (mode, lambda *x: oracle(F32, *x, mode)),
        (f"{mode}.ftz", flushing(F32, lambda _, *x: oracle(F32, *x, mode))),
    ):
        got = per_lane(f"{name}.{suffix}.f32x2 {operands(arity)}", *both, out=np.uint64)
        for part, inputs in (
            ((got & 0xFFFFFFFF).astype(np.uint32), low),
            ((got >> np.uint64(32)).astype(np.uint32), high),
        ):
            compare(F32, part, [f(*(int(v) for v in row)) for row in zip(*inputs, strict=True)], inputs)


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("name", [*ORACLES, "fma.relu", "max", "min", "max.NaN", "neg", "abs"])
def test_packed_halves_are_two_scalars(name: str, t: str) -> None:
    arity = 3 if name.startswith("fma") else 1 if name in ("neg", "abs") else 2
    low, high, both = packed(NAMES[t], 96, arity)
    spell = name.replace("fma", "fma.rn")
    got = per_lane(f"{spell}.{t}x2 {operands(arity)}", *both, out=np.uint32)
    for part, inputs in ((got & 0xFFFF, low), (got >> 16, high)):
        assert (part == per_lane(f"{spell}.{t} {operands(arity)}", *inputs, out=np.uint16)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_mixed_precision(t: str, mode: str) -> None:
    """PTX ISA 9.7.5: the narrow operands are widened exactly, the result is rounded once."""
    f = NAMES[t]
    widen = lambda c: (
        None
        if exact.is_nan(f, c)
        else (exact.infinity(F32) | (exact.is_negative(f, c) << 31))
        if exact.is_inf(f, c)
        else exact.rounded(F32, exact.value(f, c), negative_zero=exact.is_negative(f, c))
    )
    c = codes(F32, 160, 1)[0]
    a, b = (x[: len(c)] for x in codes(f, 160, 2))
    for name, inputs in (("add", [a, c]), ("sub", [a, c]), ("fma", [a, b, c])):
        got = per_lane(f"{name}.{mode}.f32.{t} {operands(len(inputs))}", *inputs, out=np.uint32)
        want = []
        for row in zip(*inputs, strict=True):
            wide = [widen(int(v)) for v in row[:-1]]
            want.append(None if None in wide else ORACLES[name][0](F32, *wide, int(row[-1]), mode))
        compare(F32, got, want, inputs)
    got = per_lane(f"add.{mode}.sat.f32.{t} {operands(2)}", a, c, out=np.uint32)
    want = [
        None if widen(int(x)) is None else exact.add(F32, widen(int(x)), int(y), mode)
        for x, y in zip(a, c, strict=True)
    ]
    compare(F32, got, [saturated(F32, w) for w in want], [a, c])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f32", "f64"])
def test_division_and_roots_round_exactly(t: str, mode: str) -> None:
    f = NAMES[t]
    one = ((1 << (f[0] - 1)) - 1) << f[1]
    check(f"div.{mode}.{t} {operands(2)}", f, lambda a, b: exact.div(f, a, b, mode), 2)
    check(f"rcp.{mode}.{t} {operands(1)}", f, lambda a: exact.div(f, one, a, mode), 1)
    check(f"sqrt.{mode}.{t} {operands(1)}", f, lambda a: exact.sqrt(f, a, mode), 1, n=64)
    if t == "f32":
        check(f"div.{mode}.ftz.f32 {operands(2)}", f, flushing(F32, lambda _, a, b: exact.div(F32, a, b, mode)), 2)
        check(f"rcp.{mode}.ftz.f32 {operands(1)}", f, flushing(F32, lambda _, a: exact.div(F32, one, a, mode)), 1)
        check(f"sqrt.{mode}.ftz.f32 {operands(1)}", f, flushing(F32, lambda _, a: exact.sqrt(F32, a, mode)), 1, n=64)


# --- min and max


def chosen(f: Format, values: tuple[int, ...], sign: int, nan: bool = False) -> int | None:
    """The extreme of codes with -0 below +0; ``sign`` 1 for max, -1 for min."""
    not_nan = [v for v in values if not exact.is_nan(f, v)]
    if not not_nan or (nan and len(not_nan) < len(values)):
        return None
    magnitude = exact.sign_bit(f) - 1
    order = lambda v: -(v & magnitude) - 1 if exact.is_negative(f, v) else v
    return max(not_nan, key=lambda v: sign * order(v))


@pytest.mark.parametrize("t", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max(name: str, t: str) -> None:
    f, sign = NAMES[t], 1 if name == "max" else -1
    check(f"{name}.{t} {operands(2)}", f, lambda *x: chosen(f, x, sign), 2)
    if t == "f64":
        return
    magnitude = exact.sign_bit(f) - 1
    check(f"{name}.NaN.{t} {operands(2)}", f, lambda *x: chosen(f, x, sign, nan=True), 2)

    def xorsign(a: int, b: int) -> int | None:
        r = chosen(f, (a & magnitude, b & magnitude), sign)
        return r if r is None else r | (a ^ b) & exact.sign_bit(f)

    check(f"{name}.xorsign.abs.{t} {operands(2)}", f, xorsign, 2)
    if t in ("f32", "f16"):
        check(f"{name}.ftz.{t} {operands(2)}", f, flushing(f, lambda _, *x: chosen(f, x, sign)), 2)
    if t == "f32":
        check(f"{name}.f32 {operands(3)}", f, lambda *x: chosen(f, x, sign), 3)
        check(f"{name}.NaN.f32 {operands(3)}", f, lambda *x: chosen(f, x, sign, nan=True), 3)
        check(f"{name}.abs.f32 {operands(3)}", f, lambda *x: chosen(f, tuple(v & magnitude for v in x), sign), 3)


@pytest.mark.parametrize("t", ["f32", "f64", "f16", "bf16"])
def test_neg_abs_copysign(t: str) -> None:
    f = NAMES[t]
    top = exact.sign_bit(f)
    a, b = codes(f, 64, 2)
    dtype = UNSIGNED[exact.WIDTH[f]]
    assert (per_lane(f"neg.{t} {operands(1)}", a, out=dtype) == a ^ dtype(top)).all()
    assert (per_lane(f"abs.{t} {operands(1)}", a, out=dtype) == a & dtype(top - 1)).all()
    if t in ("f32", "f16"):
        flat = np.array([exact.flushed(f, int(v)) for v in a], dtype)
        assert (per_lane(f"neg.ftz.{t} {operands(1)}", a, out=dtype) == flat ^ dtype(top)).all()
        assert (per_lane(f"abs.ftz.{t} {operands(1)}", a, out=dtype) == flat & dtype(top - 1)).all()
    if t in ("f32", "f64"):
        assert (per_lane(f"copysign.{t} {operands(2)}", a, b, out=dtype) == (b & dtype(top - 1) | a & dtype(top))).all()


# --- approximations: PTX ISA's bounds and tables


def sweep() -> np.ndarray:
    """Floats over the whole range, more of them where exponentials and sines are interesting."""
    wild = rng.integers(0, 1 << 32, 800, np.uint64).astype(np.uint32).view(np.float32)
    usual = rng.uniform(-130, 130, 800).astype(np.float32)
    return np.concatenate([wild, usual, rng.uniform(0, 4, 416).astype(np.float32)])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of single precision, of finite results."""
    with np.errstate(all="ignore"):
        near = np.maximum(np.abs(want), 2.0**-126)
        return np.abs(got.astype(np.float64) - want) / 2.0 ** (np.floor(np.log2(near)) - 23)


BOUNDS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "ex2.approx": (np.exp2, 2),
    "rcp.approx": (lambda x: 1 / x, 1),
    "sqrt.approx": (np.sqrt, 1),
    "rsqrt.approx": (lambda x: 1 / np.sqrt(x), 2),
}


@pytest.mark.parametrize("name", list(BOUNDS))
def test_approximations_are_within_their_bounds(name: str) -> None:
    f, bound = BOUNDS[name]
    x = sweep()
    with np.errstate(all="ignore"):
        want = f(x.astype(np.float64))
    for ftz in ("", ".ftz"):
        got = per_lane(f"{name}{ftz}.f32 {operands(1)}", x, out=np.float32)
        normal = (
            np.isfinite(x)
            & (np.abs(x) >= 2.0**-126)
            & np.isfinite(want)
            & (np.abs(want) >= 2.0**-126)
            & (np.abs(want) < 3e38)
        )
        assert normal.sum() > 300
        assert ulps(got[normal], want[normal]).max() <= bound


def test_lg2_sin_cos_tanh_are_within_their_bounds() -> None:
    x = np.abs(sweep())
    x = x[np.isfinite(x) & (x > 2.0**-126)]
    got, want = per_lane(f"lg2.approx.f32 {operands(1)}", x, out=np.float32), np.log2(x.astype(np.float64))
    inner = (x > 0.5) & (x < 2)
    assert np.abs(got - want)[inner].max() <= 2.0**-22
    assert (np.abs(got - want) <= 2.0**-22 * np.abs(want))[~inner].all()
    angle = rng.uniform(-np.pi, np.pi, 512).astype(np.float32)
    assert (
        np.abs(per_lane(f"sin.approx.f32 {operands(1)}", angle, out=np.float32) - np.sin(angle.astype(float))).max()
        <= 2.0**-20.5
    )
    assert (
        np.abs(per_lane(f"cos.approx.f32 {operands(1)}", angle, out=np.float32) - np.cos(angle.astype(float))).max()
        <= 2.0**-20.5
    )
    y = rng.uniform(-8, 8, 512).astype(np.float32)
    want = np.tanh(y.astype(float))
    assert (
        np.abs(per_lane(f"tanh.approx.f32 {operands(1)}", y, out=np.float32) - want) <= 2.0**-11 * np.abs(want)
    ).all()
    for t, dtype, bound in (("f16", np.float16, 2.0**-10.987), ("bf16", None, 2.0**-8)):
        h = y.astype(np.float16) if dtype else (y.view(np.uint32) >> 16).astype(np.uint16)
        wide = h.astype(float) if dtype else (h.astype(np.uint32) << 16).view(np.float32).astype(float)
        raw = per_lane(f"tanh.approx.{t} {operands(1)}", h, out=np.uint16)
        value = (
            raw.view(np.float16).astype(float)
            if dtype
            else (raw.astype(np.uint32) << 16).view(np.float32).astype(float)
        )
        assert np.abs(value - np.tanh(wide)).max() <= bound


INF, TINY = math.inf, 2.0**-140
TABLES = {
    "ex2.approx": [(-INF, 0.0), (-0.0, 1.0), (0.0, 1.0), (INF, INF), (TINY, 1.0), (3.0, 8.0), (-149.0, 2.0**-149)],
    "ex2.approx.ftz": [(-TINY, 1.0), (-127.0, 0.0), (127.0, 2.0**127)],
    "rcp.approx": [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0), (2.0**127, 2.0**-127)],
    "rcp.approx.ftz": [(TINY, INF), (-TINY, -INF), (2.0**127, 0.0)],
    "sqrt.approx": [(-INF, None), (-1.0, None), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (TINY, 2.0**-70)],
    "sqrt.approx.ftz": [(TINY, 0.0), (-TINY, -0.0)],
    "rsqrt.approx": [(-INF, None), (-1.0, None), (-0.0, -INF), (0.0, INF), (INF, 0.0), (4.0, 0.5)],
    "rsqrt.approx.ftz": [(TINY, INF), (-TINY, -INF)],
    "lg2.approx": [(-INF, None), (-1.0, None), (-0.0, -INF), (0.0, -INF), (INF, INF), (1.0, 0.0), (TINY, -140.0)],
    "lg2.approx.ftz": [(TINY, -INF)],
    "tanh.approx": [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0), (TINY, TINY)],
    "sin.approx": [(-0.0, -0.0), (0.0, 0.0), (INF, None), (-INF, None)],
    "sin.approx.ftz": [(TINY, 0.0), (-TINY, -0.0)],
    "cos.approx": [(0.0, 1.0), (-0.0, 1.0), (INF, None)],
    "cos.approx.ftz": [(TINY, 1.0)],
}


@pytest.mark.parametrize("name", list(TABLES))
def test_special_inputs_of_approximations(name: str) -> None:
    rows = [*TABLES[name], (math.nan, None)]
    x = np.array([r[0] for r in rows], np.float32)
    got = per_lane(f"{name}.f32 {operands(1)}", x, out=np.uint32)
    want = [NAN[F32] if w is None else int(np.float32(w).view(np.uint32)) for _, w in rows]
    assert [hex(int(v)) for v in got] == [hex(w) for w in want]


def test_ex2_in_half_precision() -> None:
    h = rng.uniform(-12, 12, 256).astype(np.float16)
    got = per_lane(f"ex2.approx.f16 {operands(1)}", h, out=np.float16).astype(float)
    assert (np.abs(got / np.exp2(h.astype(float)) - 1) <= 2.0**-9.9).all()
    b = (rng.uniform(-90, 90, 256).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wide = (b.astype(np.uint32) << 16).view(np.float32).astype(float)
    raw = per_lane(f"ex2.approx.ftz.bf16 {operands(1)}", b, out=np.uint16)
    assert (np.abs((raw.astype(np.uint32) << 16).view(np.float32).astype(float) / np.exp2(wide) - 1) <= 2.0**-7).all()
    edge = np.array(
        [0xFF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x7F80, 0x7FC0], np.uint16
    )  # the table of PTX ISA 9.7.4.10
    assert per_lane(f"ex2.approx.ftz.bf16 {operands(1)}", edge, out=np.uint16).tolist() == [
        0,
        0x3F80,
        0x3F80,
        0x3F80,
        0x3F80,
        0x7F80,
        0x7FFF,
    ]


def test_approximate_division() -> None:
    rows = [
        (6.0, 3.0, 2.0),
        (1.0, 2.0**127, 0.0),
        (-1.0, 2.0**127, -0.0),
        (INF, 2.0**127, None),
        (1.0, INF, 0.0),
        (1.0, 0.0, INF),
        (0.0, 0.0, None),
    ]
    a, b = (np.array([r[i] for r in rows], np.float32) for i in range(2))
    got = per_lane(f"div.approx.f32 {operands(2)}", a, b, out=np.uint32)
    assert got.tolist() == [NAN[F32] if r[2] is None else int(np.float32(r[2]).view(np.uint32)) for r in rows]
    x, y = rng.normal(size=512).astype(np.float32), rng.normal(size=512).astype(np.float32)
    for kind in ("approx", "full", "approx.ftz", "full.ftz"):
        assert ulps(per_lane(f"div.{kind}.f32 {operands(2)}", x, y, out=np.float32), x.astype(float) / y).max() <= 2
    far = per_lane(
        f"div.full.f32 {operands(2)}",
        np.array([2.0**127], np.float32),
        np.array([2.0**127], np.float32),
        out=np.float32,
    )
    assert far[0] == 1


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
def test_gross_approximations_of_f64(name: str) -> None:
    x = rng.uniform(0.01, 100, 64)
    got = per_lane(f"{name}.approx.ftz.f64 {operands(1)}", x, out=np.uint64)
    assert (got & np.uint64(0xFFFFFFFF) == 0).all()
    f = (lambda v: 1 / v) if name == "rcp" else (lambda v: 1 / np.sqrt(v))
    assert (np.abs(got.view(np.float64) / f(x) - 1) < 2.0**-19).all()
    edge = np.array([-np.inf, -5e-324, -0.0, 0.0, 5e-324, np.inf, np.nan])
    want = [-0.0 if name == "rcp" else None, -INF, -INF, INF, INF, 0.0, None]
    raw = per_lane(f"{name}.approx.ftz.f64 {operands(1)}", edge, out=np.uint64)
    assert raw.tolist() == [0x7FFFFFFF00000000 if w is None else int(np.float64(w).view(np.uint64)) for w in want]


def test_rsqrt_of_f64() -> None:
    x = np.array([4.0, 0.25, 2.0, 0.0, -0.0, np.inf])
    assert per_lane(f"rsqrt.approx.f64 {operands(1)}", x, out=np.float64).tolist() == [
        0.5,
        2.0,
        1 / math.sqrt(2),
        INF,
        -INF,
        0.0,
    ]


@pytest.mark.parametrize("t", ["f32", "f64"])
def test_testp(t: str) -> None:
    f = NAMES[t]
    x = np.array(specials(f), UNSIGNED[exact.WIDTH[f]])
    kinds = {
        "finite": lambda v: not exact.is_nan(f, v) and not exact.is_inf(f, v),
        "infinite": lambda v: exact.is_inf(f, v),
        "number": lambda v: not exact.is_nan(f, v),
        "notanumber": lambda v: exact.is_nan(f, v),
        "normal": lambda v: exact.flushed(f, v) == v and not exact.is_nan(f, v) and not exact.is_inf(f, v),
        "subnormal": lambda v: exact.flushed(f, v) != v,
    }
    for kind, oracle in kinds.items():
        got = per_lane(f"testp.{kind}.{t} %p0, {{0}}; selp.b32 {{d}}, 1, 0, %p0", x, out=np.uint32)
        assert got.tolist() == [int(oracle(int(v))) for v in x], kind


def test_literals() -> None:
    """PTX ISA 4.5.2: hexadecimal literals are bits, decimal ones are doubles that become what the instruction wants."""
    out, wide = np.zeros(4, np.uint32), np.zeros(1, np.float64)
    run(
        """
    mov.f32 %r0, 0f3F20F3EB; st.global.b32 [%in0], %r0;
    add.f32 %r1, 1.5, 0f3F800000; st.global.b32 [%in0+4], %r1;
    mov.b32 %r2, -5; st.global.b32 [%in0+8], %r2;
    mov.b32 %r3, 0x1F; st.global.b32 [%in0+12], %r3;
    add.f64 %d0, 0d3FF0000000000000, 0.25; st.global.b64 [%in1], %d0;""",
        out,
        wide,
    )
    assert out.tolist() == [0x3F20F3EB, int(np.float32(2.5).view(np.uint32)), 0xFFFFFFFB, 31]
    assert wide[0] == 1.25
