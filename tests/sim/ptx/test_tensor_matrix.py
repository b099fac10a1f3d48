"""mma.sync, ldmatrix, stmatrix and movmatrix (PTX ISA 9.7.14.5), form by form."""

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from .exact import F64, fma
from .snippet import run
from .tensor_pieces import TABLES, in_order, index, operand

pytestmark = pytest.mark.simulator

G, T = np.arange(32) // 4, np.arange(32) % 4


def registers_a(raw):
    """A (rows, line bytes) as the registers of 32 threads: rows g and g + 8, then 16 bytes of k further on."""
    rows, line = raw.shape
    out = []
    for chunk in range(line // 16):
        for half in range(rows // 8):
            at = 16 * chunk + 4 * T[:, None] + np.arange(4)
            out.append(raw[(G + 8 * half)[:, None], at].copy().view(np.uint32)[:, 0])
    return np.stack(out, 1)


def bytes_of(dtype, codes):
    """Codes (rows, k) as the bytes of a row: two to a byte for 4-bit types."""
    if dtype in ("s4", "u4", "e2m1x2"):
        return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)


def accumulators(m, dtype):
    """(32, registers, elements) -> row, column."""
    if dtype == "f16":
        i, e = np.meshgrid(np.arange(m // 8), np.arange(2), indexing="ij")
        return G[:, None, None] + 8 * i, 2 * T[:, None, None] + e
    i = np.arange(m // 4)[:, None]
    return G[:, None, None] + i // 2 * 8, 2 * T[:, None, None] + i % 2


def mma(text, a, b, c, d_registers, extra="", tail=""):
    """Loads the fragments from in1, in2, in3, runs the instruction, stores D to in0."""
    d = np.zeros((32, d_registers), np.uint32)
    lines, names = [], []
    for i, x in enumerate((d, a, b, c)):
        letters = "".join(f" %f{'dabc'[i]}{j}," for j in range(x.shape[1])).strip(" ,")
        names.append("{" + letters + "}")
        lines.append(f".reg .b32 %f{'dabc'[i]}<{x.shape[1]}>; mad.wide.u32 %d{20 + i}, %tid, {4 * x.shape[1]}, %in{i};")
        if i:
            lines += [f"ld.global.b32 %f{'dabc'[i]}{j}, [%d{20 + i} + {4 * j}];" for j in range(x.shape[1])]
    lines += [extra, f"mma.sync.aligned.{text} {', '.join(names)}{tail};"]
    lines += [f"st.global.b32 [%d20 + {4 * j}], %fd{j};" for j in range(d_registers)]
    # What has a kind is sm_120's.
    run("\n".join(lines), d, a.copy(), b.copy(), c.copy(), target="sm_120a" if "kind::" in text else "sm_100a")
    return d


FORMS = (
    [("m16n8k8", d, "f16", "f16") for d in ("f16", "f32")]
    + [("m16n8k16", d, "f16", "f16") for d in ("f16", "f32")]
    + [("m16n8k8", "f32", "bf16", "bf16"), ("m16n8k16", "f32", "bf16", "bf16")]
    + [("m16n8k4", "f32", "tf32", "tf32"), ("m16n8k8", "f32", "tf32", "tf32")]
    + [
        (s, d, a, b)
        for s in ("m16n8k16", "m16n8k32")
        for d in ("f16", "f32")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ]
    + [(s, "s32", a, b) for s in ("m8n8k16", "m16n8k16", "m16n8k32") for a in ("s8", "u8") for b in ("s8", "u8")]
    + [(s, "s32", a, b) for s in ("m8n8k32", "m16n8k32", "m16n8k64") for a in ("s4", "u4") for b in ("s4", "u4")]
)


def small(dtype, rows, k, rng):
    """An operand whose products f16 holds."""
    codes, values = operand(dtype, rows, k, rng)
    if dtype in ("e4m3", "e5m2"):
        codes = codes & 0xBF
        values = TABLES[dtype][codes]
    return codes, values


@pytest.mark.parametrize("shape, d, a, b", FORMS)
def test_every_shape_and_type(shape, d, a, b):
    rng = np.random.default_rng(1)
    m, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    (ac, av), (bc, bv) = small(a, m, k, rng), small(b, 8, k, rng)
    row, column = accumulators(m, d)
    if d == "f16":
        before = rng.integers(-8, 9, row.shape).astype(np.float16)
        words = before.view(np.uint32).reshape(32, -1)
    else:
        before = rng.integers(-8, 9, row.shape).astype(np.int32 if d == "s32" else np.float32)
        words = before.view(np.uint32).reshape(32, -1)
    c_type = d
    out = mma(
        f"{shape}.row.col.{d}.{a}.{b}.{c_type}",
        registers_a(bytes_of(a, ac)),
        registers_a(bytes_of(b, bc)),
        words,
        words.shape[1],
    )
    got = out.view(before.dtype).reshape(row.shape)
    if d == "s32":
        np.testing.assert_array_equal(got, before + (av @ bv.T)[row, column])
    else:
        want = before.astype(np.float32) + in_order(av, bv)[row, column]
        np.testing.assert_array_equal(got, want.astype(before.dtype))


@pytest.mark.parametrize("b", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
@pytest.mark.parametrize("a", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_narrow_types_lie_in_bytes(a, b):
    """kind::f8f6f4: e2m1 in the central four bits of a byte, 6-bit types in its lower six."""
    rng = np.random.default_rng(2)
    (ac, av), (bc, bv) = small(a, 16, 32, rng), small(b, 8, 32, rng)
    move = lambda dtype, codes: (codes << 2 if dtype == "e2m1" else codes).astype(np.uint8)
    out = mma(
        f"m16n8k32.row.col.kind::f8f6f4.f32.{a}.{b}.f32",
        registers_a(move(a, ac)),
        registers_a(move(b, bc)),
        np.zeros((32, 4), np.uint32),
        4,
    )
    row, column = accumulators(16, "f32")
    np.testing.assert_array_equal(out.view(np.float32)[..., None], in_order(av, bv)[row, column])


@pytest.mark.parametrize("m, k", [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_double_precision(m, k):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((8, k))
    halves = m // 8
    fragments = [
        np.stack([a[G + 8 * (i % halves), T + 4 * (i // halves)] for i in range(halves * k // 4)], 1),
        np.stack([b[G, T + 4 * i] for i in range(k // 4)], 1),
        rng.standard_normal((32, m // 4)),
    ]
    d = np.zeros((32, m // 4))
    lines, names = [], []
    for i, x in enumerate([d, *fragments]):
        n, letter = x.shape[1], "dabc"[i]
        names.append("{" + ", ".join(f"%f{letter}{j}" for j in range(n)) + "}")
        lines.append(f".reg .f64 %f{letter}<{n}>; mad.wide.u32 %d{20 + i}, %tid, {8 * n}, %in{i};")
        if i:
            lines += [f"ld.global.f64 %f{letter}{j}, [%d{20 + i} + {8 * j}];" for j in range(n)]
    lines.append(f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64 {', '.join(names)};")
    lines += [f"st.global.f64 [%d20 + {8 * j}], %fd{j};" for j in range(m // 4)]
    run("\n".join(lines), d, *fragments)
    i = np.arange(m // 4)
    row, column = G[:, None] + i // 2 * 8, 2 * T[:, None] + i % 2
    codes = lambda x: x.view(np.uint64).ravel().tolist()
    for got, *one in zip(codes(d), codes(fragments[2]), row.ravel(), column.ravel(), strict=True):
        want, row_of_a, row_of_b = one  # the instruction rounds once a step of k (9.7.14.5.14, .rn)
        for x, y in zip(codes(a[row_of_a]), codes(b[row_of_b]), strict=True):
            want = fma(F64, x, y, want)
        assert got == want


SCALED = [
    ("mxf8f6f4", "m16n8k32", "", "e4m3", 1, "ue8m0"),
    ("mxf4", "m16n8k64", ".scale_vec::2X", "e2m1", 2, "ue8m0"),
    ("mxf4nvf4", "m16n8k64", ".scale_vec::2X", "e2m1", 2, "ue8m0"),
    ("mxf4nvf4", "m16n8k64", ".scale_vec::4X", "e2m1", 4, "ue4m3"),
]


@pytest.mark.parametrize("thread_a, thread_b, byte", [(0, 0, 0), (1, 3, 2), (1, 1, 0), (0, 2, 2)])
@pytest.mark.parametrize("kind, shape, vector, dtype, factors, stype", SCALED)
def test_block_scaling(kind, shape, vector, dtype, factors, stype, thread_a, thread_b, byte):
    """Threads 2 * thread-id-a and the next of a quad have the factors of rows g and g + 8, thread-id-b column g's."""
    byte = 0 if factors == 4 else byte
    rng = np.random.default_rng(4)
    k = int(shape[6:])
    (ac, av), (bc, bv) = operand(dtype, 16, k, rng), operand(dtype, 8, k, rng)
    sa, sb = rng.integers(0x30, 0x48, (32, 4), dtype=np.uint8), rng.integers(0x30, 0x48, (32, 4), dtype=np.uint8)
    if stype == "ue8m0":
        sa, sb = (sa % 6 + 124).astype(np.uint8), (sb % 6 + 124).astype(np.uint8)
    worth = (lambda c: 2.0 ** (c.astype(float) - 127)) if stype == "ue8m0" else (lambda c: TABLES["e4m3"][c])
    pair = "e2m1x2" if dtype == "e2m1" else dtype
    zero = np.concatenate([np.zeros((32, 4), np.uint32), sa.view(np.uint32), sb.view(np.uint32)], 1)
    text = f"{shape}.row.col.kind::{kind}.block_scale{vector}.f32.{dtype}.{dtype}.f32.{stype}"
    a, b = registers_a(bytes_of(pair, ac)), registers_a(bytes_of(pair, bc))
    body_tail = f", %fc4, {{{byte}, {thread_a}}}, %fc5, {{{byte}, {thread_b}}}"
    d = np.zeros((32, 4), np.uint32)
    lines, names = [], []
    for i, x in enumerate((d, a, b, zero)):
        letter = "dabc"[i]
        names.append("{" + ", ".join(f"%f{letter}{j}" for j in range(min(x.shape[1], 4))) + "}")
        lines.append(f".reg .b32 %f{letter}<{x.shape[1]}>; mad.wide.u32 %d{20 + i}, %tid, {4 * x.shape[1]}, %in{i};")
        if i:
            lines += [f"ld.global.b32 %f{letter}{j}, [%d{20 + i} + {4 * j}];" for j in range(x.shape[1])]
    lines.append(f"mma.sync.aligned.{text} {', '.join(names)}{body_tail};")
    lines += [f"st.global.b32 [%d20 + {4 * j}], %fd{j};" for j in range(4)]
    run("\n".join(lines), d, a, b, zero, target="sm_120a")
    rows, columns = np.arange(16), np.arange(8)
    fa = worth(sa[rows % 8 * 4 + 2 * thread_a + rows // 8][:, byte : byte + factors])
    fb = worth(sb[columns * 4 + thread_b][:, byte : byte + factors])
    want = in_order(av * np.repeat(fa, k // factors, 1), bv * np.repeat(fb, k // factors, 1))
    row, column = accumulators(16, "f32")
    np.testing.assert_array_equal(d.view(np.float32)[..., None], want[row, column])


def test_scales_in_braces():
    """CuTeDSL's MmaMXF4NVF4Op writes them so, and ptxas takes it."""
    text = "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    results = []
    for a, b in (("%r0", "%r1"), ("{%r0}", "{%r1}")):
        out = np.zeros(128, np.float32)
        body = f"""
  .reg .f32 %f<4>;
  mov.b32 %r0, 0x38404850; mov.b32 %r1, 0x40384838; mov.b32 %r2, 0x21342134;
  mov.f32 %f0, 0f00000000;
  mma.sync.aligned.{text} {{%f0, %f1, %f2, %f3}}, {{%r2, %r2, %r2, %r2}}, {{%r2, %r2}}, {{%f0, %f0, %f0, %f0}},
    {a}, {{0, 0}}, {b}, {{0, 0}};
  mad.wide.u32 %d0, %tid, 16, %in0; st.global.v4.f32 [%d0], {{%f0, %f1, %f2, %f3}};
"""
        run(body, out, target="sm_120a")
        results.append(out)
    assert (results[0] != 0).all() and (results[0] == results[1]).all()
    with pytest.raises(PtxError, match="a scale has 2 registers, expected 1"):
        run(body.replace("{%r0}", "{%r0, %r1}"), out, target="sm_120a")


def test_integer_saturation():
    a = registers_a(np.full((16, 32), 255, np.uint8))
    b = registers_a(np.full((8, 32), 255, np.uint8))
    c = np.full((32, 4), 2**31 - 10, np.uint32)
    assert (mma("m16n8k32.row.col.satfinite.s32.u8.u8.s32", a, b, c, 4) == 2**31 - 1).all()
    assert (mma("m16n8k32.row.col.s32.u8.u8.s32", a, b, c, 4) == (2**31 - 10 + 255 * 255 * 32) % 2**32).all()


BAD = {
    "m16n8k8.row.col.f32.f16.bf16.f32": "do not go together",
    "m16n8k16.row.col.f16.bf16.bf16.f16": "does not go with",
    "m16n8k16.row.col.f32.f16.f16.f16": "same type",
    "m16n8k32.row.col.f32.f16.f16.f32": "does not exist",
    "m8n8k4.row.col.f32.f16.f16.f32": "does not exist",
    "m16n8k32.row.col.f32.e2m1.e2m1.f32": "need a .kind",
    "m16n8k16.col.col.f32.f16.f16.f32": "row",
    "m16n8k16.row.col.satfinite.f32.f16.f16.f32": "satfinite is for integers",
    "m16n8k256.row.col.s32.b1.b1.s32": "one of",
}


@pytest.mark.parametrize("text", BAD)
def test_forms_that_do_not_exist_are_refused(text):
    four, two = "{%r0, %r1, %r2, %r3}", "{%r0, %r1}"
    with pytest.raises(PtxError, match=BAD[text]):
        run(f"mma.sync.aligned.{text} {four}, {four}, {two}, {four};", np.zeros(1, np.uint32))


# --- ldmatrix, stmatrix, movmatrix

LOAD = """
  .reg .b32 %v<4>;
  mad.wide.u32 %d20, %tid, 16, %in0;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d20];
  mov.u32 %r0, smem;
  mad.lo.u32 %r1, %tid, 48, %r0;
  st.shared.v4.b32 [%r1], {{%r10, %r11, %r12, %r13}};
  bar.warp.sync 0xffffffff;
  ldmatrix.sync.aligned.{form} {{{vector}}}, [%r1];
  mad.wide.u32 %d21, %tid, {stride}, %in1;
  {store}
"""


def load_matrix(form, rows, n):
    """Row l of `rows` (32, 16 bytes) lies at thread l's address. Returns the threads' registers as bytes (32, n, 4)."""
    out = np.zeros((32, n), np.uint32)
    vector = ", ".join(f"%v{i}" for i in range(n))
    store = "\n".join(f"st.global.b32 [%d21 + {4 * i}], %v{i};" for i in range(n))
    body = LOAD.format(form=form, vector=vector, stride=4 * n, store=store)
    result = run(body, rows.copy(), out, shared=4096, check=True)
    assert not result.reports
    return out.view(np.uint8).reshape(32, n, 4)


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_of_16_bit_elements(trans, times):
    rows = np.arange(512, dtype=np.uint16).view(np.uint8)[:512].reshape(32, 16)
    got = load_matrix(f"m8n8.x{times}{trans}.shared.b16", rows, times).view(np.uint16)
    matrices = rows.view(np.uint16).reshape(4, 8, 8)
    for i in range(times):
        matrix = matrices[i].T if trans else matrices[i]
        for t in range(32):
            assert got[t, i].tolist() == matrix[t // 4, 2 * (t % 4) : 2 * (t % 4) + 2].tolist()


def cute(thread, value, source_thread):
    """Byte of register value v in thread t -> (address lane, byte of its row), from CuTe's layouts of both.

    Layouts are in bits as CuTe writes them; rows have 128 bits.
    """
    lane_of = {index(*source_thread, lane) // 128: lane for lane in reversed(range(32))}
    bits = np.array(
        [
            [
                index(*thread, t) + index(*value, 8 * v)
                for v in range(int(np.prod(list(map(int, np.ravel(value[0]))))) // 8)
            ]
            for t in range(32)
        ]
    )
    return np.vectorize(lambda x: lane_of[x // 128])(bits), bits % 128 // 8


@pytest.mark.parametrize("times, last", [(1, (0, 2)), (2, (2048, 4))])
def test_ldmatrix_of_8_bit_elements(times, last):
    """CuTe: SM100_U8x8_LDSM_T and SM100_U8x16_LDSM_T."""
    rows = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(32, 16) ^ np.arange(32, dtype=np.uint8)[:, None]
    lane, byte = cute(
        ((4, 8), (256, 8)),
        ((8, 2, 2, last[1]), (1, 128, 64, 1024)),
        ((2, 2, 4, 2), (128, 1024, 256, last[0])),
    )
    got = load_matrix(f"m16n16.x{times}.trans.shared.b8", rows, 2 * times)
    assert (got.reshape(32, -1) == rows[lane, byte]).all()


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_ldmatrix_unpacks_narrow_elements(times, bits):
    """m8n16: 16 elements packed at the start of a row of 16 bytes, each to the low bits of a byte."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1 << bits, (32, 16)).astype(np.uint8)
    rows = np.zeros((32, 16), np.uint8)
    for i in range(16):
        for bit in range(bits):
            rows[:, (i * bits + bit) // 8] |= (codes[:, i] >> bit & 1) << (i * bits + bit) % 8
    got = load_matrix(f"m8n16.x{times}.shared.b8x16.b{bits}x16_p{128 - 16 * bits}", rows, times)
    for i in range(times):
        assert (got[:, i] == codes[8 * i : 8 * i + 8].reshape(32, 4)).all()


STORE = """
  .reg .b32 %v<4>;
  mad.wide.u32 %d20, %tid, 16, %in0;
  ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%d20];
  mov.u32 %r0, smem;
  mad.lo.u32 %r1, %tid, 48, %r0;
  mov.b32 %r2, 0;
  st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
  bar.warp.sync 0xffffffff;
  stmatrix.sync.aligned.{form} [%r1], {{{vector}}};
  bar.warp.sync 0xffffffff;
  ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r1];
  mad.wide.u32 %d21, %tid, 16, %in1;
  st.global.v4.b32 [%d21], {{%r10, %r11, %r12, %r13}};
"""


def store_matrix(form, values, n):
    """Each thread's registers (32, 4); returns what lies at the threads' addresses (32, 16 bytes)."""
    out = np.zeros((32, 4), np.uint32)
    result = run(
        STORE.format(form=form, vector=", ".join(f"%v{i}" for i in range(n))),
        values.copy(),
        out,
        shared=4096,
        check=True,
    )
    assert not result.reports
    return out.view(np.uint8).reshape(32, 16)


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_of_16_bit_elements(trans, times):
    values = np.arange(1, 257, dtype=np.uint16).view(np.uint32).reshape(32, 4)
    got = store_matrix(f"m8n8.x{times}{trans}.shared.b16", values, times).view(np.uint16).reshape(4, 8, 8)
    halves = values.view(np.uint16).reshape(32, 4, 2)
    for i in range(4):
        want = halves[:, i].reshape(8, 8) if i < times else np.zeros((8, 8))
        assert (got[i] == (want.T if trans else want)).all()


@pytest.mark.parametrize("times", [1, 2, 4])
def test_stmatrix_of_8_bit_elements(times):
    """m16n8: a thread has what it has of an accumulator, (g, 2q), (g, 2q + 1), then row g + 8; columns are stored."""
    values = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(32, 16) ^ np.arange(32, dtype=np.uint8)[:, None]
    got = store_matrix(f"m16n8.x{times}.trans.shared.b8", values.view(np.uint32), times)
    for i in range(times):
        matrix = np.zeros((16, 8), np.uint8)
        for e in range(4):
            matrix[G + 8 * (e // 2), 2 * T + e % 2] = values[:, 4 * i + e]
        assert (got[8 * i : 8 * i + 8] == matrix.T).all()


def test_movmatrix_transposes():
    values = np.arange(64, dtype=np.uint16).view(np.uint32)
    out = np.zeros(32, np.uint32)
    run(
        """
  mad.wide.u32 %d20, %tid, 4, %in0; ld.global.b32 %r0, [%d20];
  movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
  mad.wide.u32 %d21, %tid, 4, %in1; st.global.b32 [%d21], %r1;
""",
        values.copy(),
        out,
    )
    assert (out.view(np.uint16).reshape(8, 8) == values.view(np.uint16).reshape(8, 8).T).all()


def test_rows_have_to_be_aligned_and_inside():
    for offset, message in ((8, "align"), (1 << 20, "shared")):
        with pytest.raises(PtxError, match=message):
            run(
                f"mov.u32 %r0, smem; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r1}}, [%r0 + {offset}];",
                shared=1024,
            )


BAD_MATRIX = {
    "ldmatrix.sync.aligned.m8n8.x1.b8 {%r1}, [%r0];": "does not exist with .b8",
    "ldmatrix.sync.aligned.m16n16.x1.b8 {%r1, %r2}, [%r0];": "does not exist",
    "ldmatrix.sync.aligned.m16n16.x4.trans.b8 {%r1, %r2}, [%r0];": "does not exist",
    "ldmatrix.sync.aligned.m8n8.x2.b16 {%r1}, [%r0];": "1 registers, expected 2",
    "stmatrix.sync.aligned.m16n8.x1.b8 [%r0], {%r1};": "does not exist",
    "stmatrix.sync.aligned.m8n8.x1.trans.global.b16 [%r0], {%r1};": "global",
    "movmatrix.sync.aligned.m8n8.b16 %r0, %r1;": "trans",
}


@pytest.mark.parametrize("text", BAD_MATRIX)
def test_matrix_forms_that_do_not_exist_are_refused(text):
    with pytest.raises(PtxError, match=BAD_MATRIX[text]):
        run(text, shared=1024)


def test_bank_conflicts_are_counted():
    """Eight rows in eight different runs of four banks take one wavefront; in the same run, eight."""
    for stride, wavefronts in ((16, 1), (128, 8), (144, 1), (64, 4)):
        body = f"mov.u32 %r0, smem; mad.lo.u32 %r0, %tid, {stride}, %r0; mov.b32 %r1, 0;"
        body += "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%r1};"
        counters = run(body, shared=8192).counters
        assert counters["shared_wavefronts"] == wavefronts
        assert counters["shared_least_wavefronts"] == 1
