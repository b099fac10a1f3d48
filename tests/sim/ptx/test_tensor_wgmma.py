"""wgmma (PTX ISA 9.7.15): operands in shared memory and registers, every swizzle, types, N, and misuse."""

import numpy as np
import pytest
import torch
from torch_attnkit.sim._ptx import PtxDeadlock, PtxError

from torch_attnkit.oracle import tensor_cores

from .snippet import run
from .tensor_pieces import FILL_SHARED, SHARED, TABLES, image, operand, store_tile

pytestmark = pytest.mark.simulator

K = {"f16": 16, "bf16": 16, "tf32": 8}
EIGHT_BITS = [(d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]


def accumulator(n, dtype):
    """(128 threads, registers, elements of a register) -> row, column of D (9.7.15.5.1.1)."""
    t = np.arange(128)
    if dtype == "f16":
        i, e = np.meshgrid(np.arange(n // 4), np.arange(2), indexing="ij")
        row, column = i % 2 * 8 + e * 0, i // 2 * 8 + e
    else:
        i = np.arange(n // 2)[:, None]
        row, column = i // 2 % 2 * 8, i // 4 * 8 + i % 2
    return (t // 32 * 16 + t % 32 // 4)[:, None, None] + row, (t % 4 * 2)[:, None, None] + column


def fragment_a(codes):
    """The four registers of each thread that hold A (64, k): rows g and g + 8, then the second half of k."""
    size = codes.dtype.itemsize
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(64, 32)
    t = np.arange(128)
    out = np.zeros((128, 4), np.uint32)
    per = 4 // size
    for r in range(4):
        row = t // 32 * 16 + t % 32 // 4 + 8 * (r % 2)
        first = (t % 4 * per + 4 * per * (r // 2)) * size
        out[:, r] = np.stack([raw[row, first + i] for i in range(4)], 1).copy().view(np.uint32)[:, 0]
    return out


def wgmma(n, dtypes, a, b, *, registers=None, enable=0, tail="", modifiers="", before_mma="", after=""):
    """A kernel of one warpgroup. in0: shared memory, in1: D (128, registers), in2: A's registers."""
    d, at, bt = dtypes
    k = K.get(at, 32)
    count = n // 4 if d == "f16" else n // 2
    vector = ", ".join(f"%v{i}" for i in range(count))
    load = "\n".join(f"ld.global.b32 %v{i}, [%d20 + {4 * i}];" for i in range(count))
    store = "\n".join(f"st.global.b32 [%d20 + {4 * i}], %v{i};" for i in range(count))
    load_a = "\n".join(f"mad.wide.u32 %d21, %tid, 16, %in2; ld.global.b32 %a{i}, [%d21 + {4 * i}];" for i in range(4))
    first = "%d12" if a else "{%a0, %a1, %a2, %a3}"
    lines = f"add.s64 %d11, %d10, {b.wgmma()};"
    if a is not None:
        lines += f"add.s64 %d12, %d10, {a.wgmma()};"
    return f"""
  .reg .b32 %v<160>;
  .reg .b32 %a<4>;
  mad.wide.u32 %d20, %tid, {4 * count}, %in1;
  {load}
  {load_a if registers is not None else ""}
  {FILL_SHARED.format(words=SHARED // 4)}
  mov.u32 %r20, smem; and.b32 %r20, %r20, 0x3ffff; shr.b32 %r20, %r20, 4; mov.b32 %r19, 0; mov.b64 %d10, {{%r20, %r19}};
  {lines}
  setp.ne.u32 %p5, {enable}, 0;
  {before_mma}
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{n}k{k}{modifiers}.{d}.{at}.{bt} {{{vector}}}, {first}, %d11, %p5{tail};
  wgmma.commit_group.sync.aligned;
  {after or "wgmma.wait_group.sync.aligned 0;"}
  {store}
"""


def launch(n, dtypes, a, b, shared, before=None, registers=None, target="sm_90a", options=None, **more):
    count = n // 4 if dtypes[0] == "f16" else n // 2
    out = np.zeros((128, count), np.uint32) if before is None else before.copy()
    arrays = [shared.copy(), out] + ([registers] if registers is not None else [])
    result = run(
        wgmma(n, dtypes, a, b, registers=registers, enable=int(before is not None), **more),
        *arrays,
        block=128,
        shared=SHARED,
        target=target,
        **(options or {}),
    )
    assert not result.reports, result.reports
    return out


def expect(out, want, n, dtype):
    row, column = accumulator(n, dtype)
    dtype = {"f16": np.float16, "s32": np.int32, "f32": np.float32}[dtype]
    np.testing.assert_array_equal(out.view(dtype).reshape(row.shape), want.astype(dtype)[row, column])


def powers(x):
    """The largest power of two in each number, 0 for 0."""
    return np.where(x == 0, 0, 2.0 ** (np.frexp(x)[1] - 1.0))


def narrow_sums(av, bv, types, before=0.0):
    """``before`` plus av (m, 32) times bv (n, 32) transposed, with Hopper's sums of 8-bit floats; in float64, which has
    room for all of it."""
    least = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
    ap, bp = (np.where(v == 0, 0, np.maximum(powers(v), least[t])) for v, t in zip((av, bv), types[1:], strict=True))
    before = np.broadcast_to(np.float64(before), (len(av), len(bv)))
    unit = 2.0**-13 * np.maximum((ap[:, None] * bp).max(-1), powers(before))
    unit = np.where(unit == 0, 1, unit)
    total = (np.trunc(av[:, None].astype(np.float64) * bv / unit[..., None]).sum(-1) + np.trunc(before / unit)) * unit
    if types[0] == "f16":
        return total
    unit = np.where(total == 0, 1, powers(total) * 2.0**-13)
    return np.trunc(total / unit) * unit


FLOAT_TAIL = {"f16": ", 1, 1, {ta}, {tb}", "bf16": ", 1, 1, {ta}, {tb}", "tf32": ", 1, 1", "e4m3": ", 1, 1", "s8": ""}


@pytest.mark.parametrize("transpose_b", [0, 1])
@pytest.mark.parametrize("transpose_a", [0, 1])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32", "e4m3", "s8"])
def test_every_swizzle_in_both_majornesses(dtype, swizzle, transpose_a, transpose_b):
    if dtype not in ("f16", "bf16") and (transpose_a or transpose_b):
        return  # the instruction has no operand for it: only 16-bit types are transposed
    rng = np.random.default_rng(1)
    shared = image()
    k = K.get(dtype, 32)
    a, av = operand(dtype, 64, k, rng)
    b, bv = operand(dtype, 96, k, rng)
    at = store_tile(shared, 0, a, swizzle, bool(transpose_a))
    bt = store_tile(shared, SHARED // 2, b, swizzle, bool(transpose_b))
    d = "s32" if dtype == "s8" else "f32"
    tail = FLOAT_TAIL[dtype].format(ta=transpose_a, tb=transpose_b)
    want = narrow_sums(av, bv, (d, dtype, dtype)) if dtype == "e4m3" else av @ bv.T
    for options in ({}, {"seed": 4}, {"check": True}):
        expect(launch(96, (d, dtype, dtype), at, bt, shared, tail=tail, options=options), want, 96, d)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n):
    rng = np.random.default_rng(n)
    shared = image()
    a, av = operand("bf16", 64, 16, rng)
    b, bv = operand("bf16", n, 16, rng)
    at, bt = store_tile(shared, 0, a, "128", False), store_tile(shared, SHARED // 2, b, "128", False)
    before = rng.integers(-9, 9, (128, n // 2)).astype(np.float32)
    out = launch(n, ("f32", "bf16", "bf16"), at, bt, shared, before.view(np.uint32), tail=", 1, 1, 0, 0")
    row, column = accumulator(n, "f32")
    np.testing.assert_array_equal(out.view(np.float32)[..., None], before[..., None] + (av @ bv.T)[row, column])


@pytest.mark.parametrize(
    "types",
    [("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32")]
    + EIGHT_BITS
    + [("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")],
)
def test_a_in_registers_and_all_types(types):
    d, at, bt = types
    rng = np.random.default_rng(5)
    shared = image()
    k = K.get(at, 32)
    a, av = operand(at, 64, k, rng)
    b, bv = operand(bt, 32, k, rng)
    if d == "f16" and at.startswith("e"):  # within the range of f16
        a, b = a & 0xBF, b & 0xBF
        av, bv = TABLES[at][a], TABLES[bt][b]
    stored = store_tile(shared, 0, b, "32", False)
    tail = "" if d == "s32" else ", 1, 1" + (", 0" if k == 16 else "")
    out = launch(32, types, None, stored, shared, registers=fragment_a(a), tail=tail)
    expect(out, narrow_sums(av, bv, types) if at.startswith("e") else av @ bv.T, 32, d)


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**14])  # of the sum so far: below, among and above the products
@pytest.mark.parametrize("types", EIGHT_BITS)
def test_sums_of_8_bit_floats_are_as_narrow_as_hopper_s(types, scale):
    """To the bit, zeros and numbers below the normal ones among the operands; sums with nothing to add are cut."""
    d, at, bt = types
    rng = np.random.default_rng(9)
    shared = image()
    a, b = operand(at, 64, 32, rng)[0], operand(bt, 96, 32, rng)[0]
    a, b = (np.where(rng.random(x.shape) < 0.1, x & 0x83, x) for x in (a, b))
    a[0], b[:8] = 0, 0
    if d == "f16":  # whose range is small
        a, b, scale = a & 0xBF, b & 0xBF, min(scale, 2.0**8)
    av, bv = TABLES[at][a], TABLES[bt][b]
    dtype = np.float16 if d == "f16" else np.float32
    before = (rng.standard_normal((64, 96)) * scale).astype(dtype)
    row, column = accumulator(96, d)
    registers = np.ascontiguousarray(before[row, column]).reshape(128, -1).view(np.uint32)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    out = launch(96, types, at, bt, shared, registers, tail=", 1, 1")
    want = narrow_sums(av, bv, types, before)
    assert np.isfinite(want).all() and not np.array_equal(want, av @ bv.T + before)
    np.testing.assert_array_equal(out.view(dtype).reshape(row.shape), want.astype(dtype)[row, column])


def test_the_oracle_has_the_same_sums():
    """Those that tolerances of E4M3 come from, over two steps; a third of the operands below the normal numbers."""
    rng = np.random.default_rng(11)
    a, b = operand("e4m3", 40, 64, rng)[0], operand("e4m3", 24, 64, rng)[0]
    a, b = (np.where(rng.random(x.shape) < 0.3, x & 0x87, x).astype(np.uint8) for x in (a, b))
    av, bv = TABLES["e4m3"][a], TABLES["e4m3"][b]
    types = ("f32", "e4m3", "e4m3")
    want = narrow_sums(av[:, 32:], bv[:, 32:], types, narrow_sums(av[:, :32], bv[:, :32], types))
    got = tensor_cores.products(*(torch.from_numpy(x).view(torch.float8_e4m3fn) for x in (a, b)))
    np.testing.assert_array_equal(got.numpy(), want)


def test_infinity_and_nan_reach_what_they_do_in_float():
    rng = np.random.default_rng(10)
    shared = image()
    a, b = operand("e5m2", 64, 32, rng)[0], operand("e5m2", 8, 32, rng)[0]
    a[:, :3] = 0x3C  # ones
    a[1, 0], a[2, 1], b[3, 2] = 0x7C, 0x7F, 0xFC  # infinity, NaN, minus infinity
    av, bv = TABLES["e5m2"][a], TABLES["e5m2"][b]
    before = np.zeros((64, 8), np.float32)
    before[5, 5], before[6, 6] = np.inf, np.nan
    row, column = accumulator(8, "f32")
    registers = np.ascontiguousarray(before[row, column]).reshape(128, -1).view(np.uint32)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    out = launch(8, ("f32", "e5m2", "e5m2"), at, bt, shared, registers, tail=", 1, 1").view(np.float32)
    with np.errstate(invalid="ignore"):
        plain = (av[:, None] * bv).sum(-1) + before
    finite = np.isfinite(plain)
    clean = narrow_sums(np.where(np.isfinite(av), av, 0), np.where(np.isfinite(bv), bv, 0), ("f32", "e5m2", "e5m2"))
    np.testing.assert_array_equal(out.reshape(row.shape), np.where(finite, clean, plain)[row, column])
    assert 0 < (~finite).sum() < finite.sum()


def test_negation_and_saturation():
    rng = np.random.default_rng(6)
    shared = image()
    a, av = operand("f16", 64, 16, rng)
    b, bv = operand("f16", 16, 16, rng)
    at, bt = store_tile(shared, 0, a, "64", False), store_tile(shared, SHARED // 2, b, "64", False)
    for sa, sb in ((-1, 1), (1, -1), (-1, -1)):
        out = launch(16, ("f32", "f16", "f16"), at, bt, shared, tail=f", {sa}, {sb}, 0, 0")
        expect(out, sa * sb * (av @ bv.T), 16, "f32")
    a8 = np.full((64, 32), 255, np.uint8)
    at, bt = store_tile(shared, 0, a8, "32", False), store_tile(shared, SHARED // 2, a8[:16], "32", False)
    before = np.full((128, 8), 2**31 - 100, np.uint32)
    out = launch(16, ("s32", "u8", "u8"), at, bt, shared, before, modifiers=".satfinite")
    assert (out == 2**31 - 1).all()
    out = launch(16, ("s32", "u8", "u8"), at, bt, shared, before)
    assert (out == (2**31 - 100 + 255 * 255 * 32) % 2**32).all()


def test_the_four_warps_may_arrive_in_any_order():
    rng = np.random.default_rng(7)
    shared = image()
    a, av = operand("bf16", 64, 16, rng)
    b, bv = operand("bf16", 8, 16, rng)
    at, bt = store_tile(shared, 0, a, "none", False), store_tile(shared, SHARED // 2, b, "none", False)
    delay = """
  shr.u32 %r30, %tid, 5; mul.lo.u32 %r30, %r30, 3000;
LOOP: sub.u32 %r30, %r30, 1; setp.gt.s32 %p6, %r30, 0; @%p6 bra LOOP;
"""
    for seed in range(3):
        out = launch(
            8, ("f32", "bf16", "bf16"), at, bt, shared, tail=", 1, 1, 0, 0", options={"seed": seed}, before_mma=delay
        )
        expect(out, av @ bv.T, 8, "f32")


def stored_zeros():
    shared = image()
    at = store_tile(shared, 0, np.zeros((64, 16), np.uint16), "32", False)
    bt = store_tile(shared, SHARED // 2, np.zeros((8, 16), np.uint16), "32", False)
    return at, bt, shared


def test_a_missing_warp_is_a_deadlock():
    at, bt, shared = stored_zeros()
    body = wgmma(
        8, ("f32", "f16", "f16"), at, bt, tail=", 1, 1, 0, 0", before_mma="setp.ge.u32 %p6, %tid, 96; @%p6 ret;"
    )
    with pytest.raises(PtxDeadlock, match="waiting for the other warps of the warpgroup"):
        run(body, shared, np.zeros((128, 4), np.uint32), block=128, shared=SHARED, target="sm_90a")


def test_the_results_must_be_waited_for():
    """A checked run reports registers that are read before wgmma.wait_group has covered the operation."""
    at, bt, shared = stored_zeros()
    body = wgmma(8, ("f32", "f16", "f16"), at, bt, tail=", 1, 1, 0, 0", after="wgmma.wait_group.sync.aligned 1;")
    result = run(body, shared, np.zeros((128, 4), np.uint32), block=128, shared=SHARED, target="sm_90a", check=True)
    assert any("wgmma" in report for report in result.reports), result.reports


BAD = [
    (("f32", "f16", "bf16"), 8, ", 1, 1, 0, 0", "do not go together"),
    (("f16", "bf16", "bf16"), 8, ", 1, 1, 0, 0", "does not go with"),
    (("s32", "f16", "f16"), 8, ", 1, 1, 0, 0", "does not go with"),
    (("f32", "f16", "f16"), 12, ", 1, 1, 0, 0", "multiples of 8"),
    (("f32", "f16", "f16"), 264, ", 1, 1, 0, 0", "multiples of 8"),
    (("s32", "s8", "s8"), 40, "", "multiple of 16 for integers"),
    (("f32", "f16", "f16"), 8, ", 1, 2, 0, 0", "operand 6 has to be 1 or -1"),
    (("f32", "f16", "f16"), 8, ", 1, 1, 0", "operand 8 is missing"),
    (("f32", "tf32", "tf32"), 8, ", 1, 1, 0, 0", "operands"),
]


@pytest.mark.parametrize("types, n, tail, message", BAD)
def test_forms_that_do_not_exist_are_refused(types, n, tail, message):
    at, bt, shared = stored_zeros()
    with pytest.raises(PtxError, match=message):
        run(
            wgmma(n, types, at, bt, tail=tail),
            shared,
            np.zeros((128, 256), np.uint32),
            block=128,
            shared=SHARED,
            target="sm_90a",
        )


def test_descriptors_have_to_agree_and_lie_in_shared_memory():
    at, bt, shared = stored_zeros()
    out = np.zeros((128, 4), np.uint32)
    body = wgmma(
        8,
        ("f32", "f16", "f16"),
        at,
        bt,
        tail=", 1, 1, 0, 0",
        before_mma="setp.ge.u32 %p6, %tid, 64; @%p6 add.s64 %d11, %d11, 2;",
    )
    with pytest.raises(PtxError, match="different descriptors"):
        run(body, shared, out, block=128, shared=SHARED, target="sm_90a")
    body = wgmma(8, ("f32", "f16", "f16"), at, bt, tail=", 1, 1, 0, 0", before_mma="add.s64 %d11, %d11, 8192;")
    with pytest.raises(PtxError, match="matrix in shared memory of CTA 0"):
        run(body, shared, out, block=128, shared=SHARED, target="sm_90a")
