"""cvt, cvt.pack and cvta (PTX ISA 9.7.9.20 to 9.7.9.22), compared with integers and exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from . import exact
from .exact import BF16, F16, F32, F64, Format
from .snippet import per_lane, run
from .test_core_float import MODES, NAMES, NAN, UNSIGNED, codes, compare, specials
from .test_core_integer import DTYPES, clamp, edge, limits, wrap

pytestmark = pytest.mark.simulator

INTEGERS = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
rng = np.random.default_rng(7)


def bits(t: str) -> int:
    return int(t[1:])


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_between_integers(source: str, target: str) -> None:
    """Cut or extended by the source's sign; .sat clamps; a wider register is filled by the target's sign."""
    x = edge(source)
    for sat in (False, True):
        low, high = limits(target)
        if sat and low <= limits(source)[0] and limits(source)[1] <= high:
            continue
        f = (lambda v: clamp(v, target)) if sat else (lambda v: wrap(v, target))
        name = f"cvt{'.sat' if sat else ''}.{target}.{source} {{d}}, {{0}}"
        assert per_lane(name, x, out=DTYPES[target]).tolist() == [f(int(v)) for v in x]
        wide = per_lane(f"cvt{'.sat' if sat else ''}.{target}.{source} %d9, {{0}}; mov.b64 {{d}}, %d9", x, out=np.int64)
        assert wide.tolist() == [wrap(f(int(v)), "s64") for v in x]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_float(source: str, t: str, mode: str) -> None:
    x, f = edge(source), NAMES[t]
    got = per_lane(f"cvt.{mode}.{t}.{source} {{d}}, {{0}}", x, out=UNSIGNED[exact.WIDTH[f]])
    compare(f, got, [exact.rounded(f, Fraction(int(v)), mode) for v in x], [x])


WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def floats(f: Format) -> np.ndarray:
    """Special values, halves between integers, and values around the ends of the integer types."""
    near = [Fraction(n, 4) for n in range(-20, 21)]
    near += [
        s * (Fraction(2) ** e + d)
        for e in (7, 8, 15, 16, 31, 32, 63, 64)
        for d in (-1, Fraction(-1, 2), 0, 1)
        for s in (1, -1)
    ]
    return np.array(specials(f) + [exact.rounded(f, v) for v in near], UNSIGNED[exact.WIDTH[f]])


@pytest.mark.parametrize("mode", list(WHOLE))
@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("target", INTEGERS)
def test_float_to_integer(target: str, t: str, mode: str) -> None:
    f, x = NAMES[t], floats(NAMES[t])
    low, high = limits(target)

    def oracle(code: int) -> int:
        if exact.is_nan(f, code):
            return 0 if t != "f64" and bits(target) != 64 else wrap(1 << bits(target) - 1, target)
        if exact.is_inf(f, code):
            return low if exact.is_negative(f, code) else high
        return clamp(WHOLE[mode](exact.value(f, code)), target)

    assert per_lane(f"cvt.{mode}.{target}.{t} {{d}}, {{0}}", x, out=DTYPES[target]).tolist() == [
        oracle(int(v)) for v in x
    ]


@pytest.mark.parametrize("mode", list(WHOLE))
@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_float_to_whole_float(t: str, mode: str) -> None:
    f, x = NAMES[t], floats(NAMES[t])

    def oracle(code: int) -> int | None:
        if exact.is_nan(f, code):
            return None
        return (
            code
            if exact.is_inf(f, code)
            else exact.rounded(f, Fraction(WHOLE[mode](exact.value(f, code))), negative_zero=exact.is_negative(f, code))
        )

    compare(f, per_lane(f"cvt.{mode}.{t}.{t} {{d}}, {{0}}", x, out=x.dtype), [oracle(int(v)) for v in x], [x])


def moved(source: Format, target: Format, code: int, mode: str = "rn") -> int | None:
    if exact.is_nan(source, code):
        return None
    sign = exact.sign_bit(target) if exact.is_negative(source, code) else 0
    if exact.is_inf(source, code):
        return sign | exact.infinity(target)
    return exact.rounded(target, exact.value(source, code), mode, bool(sign))


@pytest.mark.parametrize("source", list(NAMES))
@pytest.mark.parametrize("target", list(NAMES))
def test_between_floats(source: str, target: str) -> None:
    s, t = NAMES[source], NAMES[target]
    if source == target:
        return
    x = np.concatenate([codes(s, 96, 1)[0], floats(s)])
    if (s, t) == (F64, F32) or (s, t) == (F32, F16):  # ties and their neighbours in the bits that are dropped
        cut = s[1] - t[1]
        x = np.concatenate(
            [x, (x & x.dtype.type(~((1 << cut) - 1) & ((1 << exact.WIDTH[s]) - 1))) | x.dtype.type(1 << cut - 1)]
        )
    narrows = exact.WIDTH[t] < exact.WIDTH[s] or {source, target} == {"f16", "bf16"}
    for mode in MODES if narrows else [""]:
        got = per_lane(
            f"cvt{'.' + mode if mode else ''}.{target}.{source} {{d}}, {{0}}", x, out=UNSIGNED[exact.WIDTH[t]]
        )
        compare(t, got, [moved(s, t, int(v), mode or "rn") for v in x], [x])


def test_saturation_and_ftz_of_scalars() -> None:
    x = floats(F32)
    one = 127 << 23
    sat = lambda c: 0 if exact.is_nan(F32, c) or exact.is_negative(F32, c) else min(c, one)
    assert per_lane("cvt.sat.f32.f32 {d}, {0}", x, out=np.uint32).tolist() == [sat(int(v)) for v in x]
    got = per_lane("cvt.rn.sat.f16.f32 {d}, {0}", x, out=np.uint16)
    assert got.tolist() == [moved(F32, F16, sat(int(v))) for v in x]
    tiny = np.array([1, 0x80000001, 0x007FFFFF, 0x00800000], np.uint32)
    assert per_lane("cvt.ftz.rpi.s32.f32 {d}, {0}", tiny, out=np.int32).tolist() == [0, 0, 0, 1]
    assert per_lane("cvt.rpi.s32.f32 {d}, {0}", tiny, out=np.int32).tolist() == [1, 0, 1, 1]
    assert per_lane("cvt.rni.ftz.f32.f32 {d}, {0}", tiny, out=np.uint32).tolist() == [0, 0x80000000, 0, 0]
    small = np.array([2.0**-140, -(2.0**-140)])
    assert per_lane("cvt.rn.ftz.f32.f64 {d}, {0}", small, out=np.uint32).tolist() == [0, 0x80000000]


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_relu_and_satfinite(t: str, mode: str) -> None:
    f, x = NAMES[t], np.concatenate([codes(F32, 64, 1)[0], floats(F32)])
    largest = exact.infinity(f) - 1

    def oracle(code: int, relu: bool, finite: bool) -> int | None:
        r = moved(F32, f, code, mode)
        if r is None:
            return None
        if relu and exact.is_negative(F32, code):
            return 0
        return r - 1 if finite and exact.is_inf(f, r) else r

    assert largest == exact.infinity(f) - 1
    for relu in (False, True):
        for finite in (False, True):
            name = f"cvt.{mode}{'.relu' * relu}{'.satfinite' * finite}.{t}"
            want = [oracle(int(v), relu, finite) for v in x]
            compare(f, per_lane(f"{name}.f32 {{d}}, {{0}}", x, out=np.uint16), want, [x])
            y = x[::-1].copy()
            both = per_lane(f"{name}x2.f32 {{d}}, {{0}}, {{1}}", x, y, out=np.uint32)
            compare(f, both >> 16, want, [x])
            compare(f, both & 0xFFFF, want[::-1], [y])


@pytest.mark.parametrize("mode", ["rn", "rz", "rna"])
def test_tf32(mode: str) -> None:
    x = np.concatenate([codes(F32, 128, 1)[0], (np.arange(64, dtype=np.uint32) << 12) | 0x3F800000])
    tf32: Format = (8, 10)

    def oracle(code: int, finite: bool, relu: bool) -> int:
        if exact.is_nan(F32, code):
            return NAN[F32]
        if relu and exact.is_negative(F32, code):
            return 0
        sign, magnitude = code & 1 << 31, code & 0x7FFFFFFF
        if mode == "rna":  # half away from zero is half up on magnitudes
            r = magnitude + (1 << 12) >> 13
        else:
            r = (
                exact.infinity(tf32)
                if exact.is_inf(F32, code)
                else exact.rounded(tf32, abs(exact.value(F32, code)), mode)
            )
        r = min(r, exact.infinity(tf32) - finite)
        return sign | r << 13

    for finite in (False, True):
        for relu in (False, True) if mode != "rna" else (False,):
            name = f"cvt.{mode}{'.satfinite' * finite}{'.relu' * relu}.tf32.f32 {{d}}, {{0}}"
            assert per_lane(name, x, out=np.uint32).tolist() == [oracle(int(v), finite, relu) for v in x]


SMALL: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}  # e3m2, e2m3, e2m1: positive MAX_NORM


def encoded(name: str, x: np.ndarray, relu: bool) -> np.ndarray:
    """Nearest code, ties to even, by ml_dtypes; everything beyond the range at its end (.satfinite)."""
    kind = SMALL[name]
    largest = float(ml_dtypes.finfo(kind).max)
    with np.errstate(all="ignore"):
        v = np.clip(np.where(np.isnan(x), 0, x).astype(np.float64), -largest, largest)
    v = np.where(relu & (v <= 0), 0, v)
    raw = v.astype(np.float32).astype(kind).view(np.uint8).astype(np.uint32)
    sign = 1 << {"e4m3": 7, "e5m2": 7, "e3m2": 5, "e2m3": 5, "e2m1": 3}[name]
    raw = raw & (2 * sign - 1)
    return np.where(np.isnan(x), NAN_CODE[name], raw)


def values(name: str) -> np.ndarray:
    """Every value of the format, every midpoint, neighbours of midpoints, and what is beyond."""
    n = {"e4m3": 256, "e5m2": 256, "e3m2": 64, "e2m3": 64, "e2m1": 16}[name]
    exactly = np.arange(n).astype(np.uint8).view(SMALL[name]).astype(np.float64)
    exactly = np.unique(exactly[np.isfinite(exactly)])
    middle = (exactly[1:] + exactly[:-1]) / 2
    x = np.concatenate([exactly, middle]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    beyond = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, -1e-30, 464, 480, -0.0, 61440, 65536], np.float32)
    return np.concatenate([x, beyond])


@pytest.mark.parametrize("name", list(SMALL))
def test_to_small_floats(name: str) -> None:
    x = values(name)
    y = x[::-1].copy()
    width = 4 if name == "e2m1" else 8
    for relu in (False, True):
        spell = f"cvt.rn.satfinite{'.relu' * relu}.{name}x2"
        want = encoded(name, x, relu) << width | encoded(name, y, relu)
        assert per_lane(f"{spell}.f32 {{d}}, {{0}}, {{1}}", x, y, out=np.uint16).tolist() == want.tolist()
        for half, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
            with np.errstate(all="ignore"):
                p, q = x.astype(dtype), y.astype(dtype)
            packed = p.view(np.uint16).astype(np.uint32) << 16 | q.view(np.uint16)
            want = encoded(name, p.astype(np.float32), relu) << width | encoded(name, q.astype(np.float32), relu)
            assert per_lane(f"{spell}.{half}x2 {{d}}, {{0}}", packed, out=np.uint16).tolist() == want.tolist()


@pytest.mark.parametrize("name", list(SMALL))
def test_from_small_floats(name: str) -> None:
    n, width = {"e4m3": 256, "e5m2": 256, "e3m2": 64, "e2m3": 64, "e2m1": 16}[name], 4 if name == "e2m1" else 8
    low = np.arange(n).astype(np.uint16)
    high = low[::-1].copy()
    wide = lambda c: c.astype(np.uint8).view(SMALL[name]).astype(np.float32)
    got = per_lane(f"cvt.rn.f16x2.{name}x2 {{d}}, {{0}}", high << width | low, out=np.uint32)
    rectified = per_lane(f"cvt.rn.relu.f16x2.{name}x2 {{d}}, {{0}}", high << width | low, out=np.uint32)
    for shift, code in ((0, low), (16, high)):
        want = wide(code).astype(np.float16)
        assert (((got >> shift) & 0xFFFF) == np.where(np.isnan(want), 0x7FFF, want.view(np.uint16))).all()
        relu = np.where(np.isnan(want), 0x7FFF, np.where(want > 0, want.view(np.uint16), 0))
        assert (((rectified >> shift) & 0xFFFF) == relu).all()


def test_ue8m0() -> None:
    """Powers of two: .rz below, .rp above; 0xff is NaN, and the ends saturate."""
    x = np.array([1, 1.5, 2, 3, 2.0**-127, 2.0**-130, 3e38, np.inf, np.nan, 0, -4, 1.0000001], np.float32)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(x.astype(float)))) + 127
    down = [
        255 if np.isnan(v) else 254 if np.isinf(v) else int(np.clip(e, 0, 254))
        for v, e in zip(x, exponent, strict=True)
    ]
    power = [
        not np.isnan(v) and np.isfinite(e) and 2.0 ** (e - 127) == abs(float(v))
        for v, e in zip(x, exponent, strict=True)
    ]
    up = [
        d if d in (255, 254) or p or v == 0 or v == np.float32(2.0**-130) else d + 1
        for d, p, v in zip(down, power, x, strict=True)
    ]
    y = np.ones_like(x)
    for finite in ("", ".satfinite"):
        for mode, want in (("rz", down), ("rp", up)):
            got = per_lane(f"cvt.{mode}{finite}.ue8m0x2.f32 {{d}}, {{0}}, {{1}}", x, y, out=np.uint16)
            assert got.tolist() == [w << 8 | 127 for w in want]
    packed = np.array([0x3F80_4040, 0x7FC0_0080], np.uint32)  # 1.0 and 3.0; NaN and 2^-126
    assert per_lane("cvt.rz.ue8m0x2.bf16x2 {d}, {0}", packed, out=np.uint16).tolist() == [127 << 8 | 128, 255 << 8 | 1]
    code = np.array([127 << 8 | 128, 0xFF00 | 254, 1 << 8], np.uint16)
    assert per_lane("cvt.rn.bf16x2.ue8m0x2 {d}, {0}", code, out=np.uint32).tolist() == [
        0x3F80_4000,
        0x7FFF_7F00,
        0x0080_0040,
    ]


def test_from_fixed_point() -> None:
    """.s2f6: two's complement in units of 2^-6 (5.2.4), converted exactly and then multiplied by a power of two."""
    code = np.arange(256).repeat(5).astype(np.uint16)
    scale = np.tile([0, 127, 133, 254, 255], 256).astype(np.uint16)
    a, s = code << 8 | code[::-1], scale << 8 | scale[::-1]
    value = code.astype(np.uint8).view(np.int8) / 64.0

    def wanted(v: np.ndarray, finite: bool, relu: bool) -> np.ndarray:
        largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
        v = np.clip(v, -largest, largest) if finite else v
        v = np.where(v <= 0, 0.0, v) if relu else v
        half = v.astype(np.float32).astype(ml_dtypes.bfloat16)
        assert (half.astype(np.float64) == v)[np.isfinite(v) & (np.abs(v) <= largest)].all()  # nothing was rounded
        half = np.where(np.isnan(v), 0x7FFF, half.view(np.uint16)).astype(np.uint32)
        return half << 16 | half[::-1]

    with np.errstate(all="ignore"):
        scaled = np.where(scale == 255, np.nan, value * 2.0 ** (scale.astype(np.float64) - 127))
        for finite in (False, True):
            for relu in (False, True):
                name = f"cvt.rn{'.satfinite' * finite}{'.relu' * relu}"
                got = per_lane(f"{name}.scaled::n2::ue8m0.bf16x2.s2f6x2 {{d}}, {{0}}, {{1}}", a, s, out=np.uint32)
                assert got.tolist() == wanted(scaled, finite, relu).tolist()
                got = per_lane(f"{name}.bf16x2.s2f6x2 {{d}}, {{0}}", a, out=np.uint32)
                assert got.tolist() == wanted(value, finite, relu).tolist()
    with pytest.raises(PtxError, match="'.s2f6x2' is not supported on .target 'sm_100f'"):
        run("cvt.rn.bf16x2.s2f6x2 %r0, %h0;", target="sm_100f")


@pytest.mark.parametrize("t", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack(t: str) -> None:
    n = bits(t)
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if t[0] == "s" else (0, (1 << n) - 1)
    a, b, c = edge("s32"), edge("s32"), edge("u32")
    cut = lambda v: min(max(int(v), low), high) & (1 << n) - 1
    above = lambda v: (int(v) << 2 * n) & 0xFFFFFFFF if n < 16 else 0
    want = [above(z) | cut(x) << n | cut(y) for x, y, z in zip(a, b, c, strict=True)]
    third, inputs = (".b32", [a, b, c]) if n < 16 else ("", [a, b])
    names = ", ".join(f"{{{i}}}" for i in range(len(inputs)))
    assert per_lane(f"cvt.pack.sat.{t}.s32{third} {{d}}, {names}", *inputs, out=np.uint32).tolist() == want


def test_cvta() -> None:
    """A generic address reaches the same memory as the one of its state space, and converts back to it."""
    out = np.zeros(4, np.uint32)
    run(
        """
    .local .align 8 .b8 here[16];
    mov.u32 %r0, smem; cvt.u64.u32 %d0, %r0;
    cvta.shared.u64 %d1, %d0; mov.u32 %r1, 11; st.u32 [%d1+4], %r1; ld.shared.u32 %r2, [smem+4];
    cvta.to.shared.u64 %d2, %d1; setp.eq.u64 %p0, %d2, %d0; selp.u32 %r3, 1, 0, %p0;
    mov.u64 %d3, here; cvta.local.u64 %d4, %d3; mov.u32 %r4, 22; st.u32 [%d4+8], %r4; ld.local.u32 %r5, [here+8];
    cvta.to.local.u64 %d5, %d4; setp.eq.and.u64 %p0, %d5, %d3, %p0; selp.u32 %r3, 1, 0, %p0;
    cvta.to.global.u64 %d6, %in0; cvta.global.u64 %d7, %d6;
    st.global.u32 [%d6], %r2; st.u32 [%d7+4], %r5; st.global.u32 [%in0+8], %r3;""",
        out,
        shared=64,
    )
    assert out.tolist() == [11, 22, 1, 0]


def test_float16_and_bfloat16_against_numpy() -> None:
    x = np.concatenate([rng.normal(size=512), rng.normal(size=512) * 1e-6]).astype(np.float32)
    y = x[::-1].copy()
    got = per_lane("cvt.rn.f16x2.f32 {d}, {0}, {1}", x, y, out=np.uint32)
    assert ((got >> 16) == x.astype(np.float16).view(np.uint16)).all() and (
        (got & 0xFFFF) == y.astype(np.float16).view(np.uint16)
    ).all()
    got = per_lane("cvt.rn.bf16x2.f32 {d}, {0}, {1}", x, y, out=np.uint32)
    assert ((got >> 16) == x.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert ((got & 0xFFFF) == y.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert BF16 == (8, 7)
