"""tcgen05.mma (PTX ISA 9.7.16.10): kinds, descriptors, swizzles, layouts of D and A in tensor memory, scale factors."""

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from .tensor_pieces import SHARED, TABLES, image, in_order, operand, run_tensor, store_tile

pytestmark = pytest.mark.simulator

K = {"f16": 16, "bf16": 16, "tf32": 8}
KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}
TYPE_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "u8": 0, "s8": 1}


def instruction_descriptor(a, b, m, n, d="f32", **fields):
    """Table 42."""
    word = {"f16": 0, "f32": 1, "s32": 2}[d] << 4 | TYPE_CODE[a] << 7 | TYPE_CODE[b] << 10 | n >> 3 << 17 | m >> 4 << 24
    for name, at in {"saturate": 3, "negate_a": 13, "negate_b": 14, "transpose_a": 15, "transpose_b": 16}.items():
        word |= fields.pop(name, 0) << at
    assert not fields
    return word


def mma(kind, word, a, b, *, group=1, modifiers="", enable=0, rest="", ws=False, a_column=None, d="%taddr"):
    """The body: descriptors, which count from the start of the dynamic shared memory, and the instruction."""
    lines = [
        "mov.u32 %r20, smem; and.b32 %r20, %r20, 0x3ffff; shr.b32 %r20, %r20, 4;",
        "mov.b32 %r19, 0; mov.b64 %d10, {%r20, %r19};",
        f"add.s64 %d11, %d10, {b.tcgen05()};",
        f"mov.b32 %r21, {word};",
        f"setp.ne.u32 %p5, {int(enable)}, 0;",
    ]
    if a_column is None:
        lines.append(f"add.s64 %d12, %d10, {a.tcgen05()};")
        first = "%d12"
    else:
        lines.append(f"add.u32 %r22, {d}, {a_column};")
        first = "[%r22]"
    name = f"tcgen05.mma{'.ws' if ws else ''}.cta_group::{group}.kind::{kind}{modifiers}"
    lines.append(f"{name} [{d}], {first}, %d11, %r21, {rest.format(enable='%p5') or '%p5'};")
    return "\n".join(lines)


def tensor(columns=256, groups=1, fill=0x7FC00000):
    return np.full((groups, 128, columns) if groups > 1 else (128, columns), fill, np.uint32)


def rows_f(m=64, lane=0):
    """Lanes of layout F."""
    r = np.arange(m)
    return lane + 32 * (r // 16) + r % 16


OPTIONS = [{}, {"seed": 5}, {"check": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["eager", "seed", "checked"])
@pytest.mark.parametrize("m, n", [(128, 128), (128, 256), (128, 8), (64, 64), (64, 24)])
def test_shapes_and_layouts_of_one_cta(m, n, options):
    rng = np.random.default_rng(m + n)
    shared = image()
    a, a_values = operand("bf16", m, 16, rng)
    b, b_values = operand("bf16", n, 16, rng)
    a_at, b_at = store_tile(shared, 0, a, "128", False), store_tile(shared, SHARED // 2, b, "128", False)
    out = run_tensor(mma("f16", instruction_descriptor("bf16", "bf16", m, n), a_at, b_at), shared, tensor(), **options)
    lanes = np.arange(128) if m == 128 else rows_f()
    assert (out[lanes, :n].view(np.float32) == a_values @ b_values.T).all()
    untouched = np.ones(out.shape, bool)
    untouched[np.ix_(lanes, np.arange(n))] = False
    assert (out[untouched] == 0x7FC00000).all()


@pytest.mark.parametrize("transpose_b", [0, 1])
@pytest.mark.parametrize("transpose_a", [0, 1])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128", "128/32"])
@pytest.mark.parametrize("dtype", ["f16", "tf32", "e4m3", "s8"])
def test_every_swizzle_in_both_majornesses(dtype, swizzle, transpose_a, transpose_b):
    rng = np.random.default_rng(1)
    shared = image()
    k = K.get(dtype, 32)
    a, a_values = operand(dtype, 128, k, rng)
    b, b_values = operand(dtype, 64, k, rng)
    a_at, b_at = (
        store_tile(shared, 0, a, swizzle, bool(transpose_a)),
        store_tile(shared, SHARED // 2, b, swizzle, bool(transpose_b)),
    )
    d = "s32" if dtype == "s8" else "f32"
    word = instruction_descriptor(dtype, dtype, 128, 64, d, transpose_a=transpose_a, transpose_b=transpose_b)
    body = mma(KIND.get(dtype, "f8f6f4"), word, a_at, b_at)
    # Table 54: 32-byte atomicity belongs to transposed 32-bit operands and to nothing else.
    wants_32 = {dtype == "tf32" and bool(t) for t in (transpose_a, transpose_b)}
    if wants_32 != {swizzle == "128/32"}:
        with pytest.raises(PtxError, match="32-byte atomicity"):
            run_tensor(body, shared, tensor())
        return
    out = run_tensor(body, shared, tensor())[:, :64]
    want = in_order(a_values, b_values)
    np.testing.assert_array_equal(out.view(np.int32 if d == "s32" else np.float32), want)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32", "e5m2", "s8"])
def test_moving_the_start_by_32_bytes_is_the_next_step_of_k(dtype):
    rng = np.random.default_rng(3)
    shared = image()
    k = K.get(dtype, 32)
    a, a_values = operand(dtype, 128, 4 * k, rng)
    b, b_values = operand(dtype, 32, 4 * k, rng)
    a_at, b_at = store_tile(shared, 0, a, "128", False), store_tile(shared, SHARED // 2, b, "128", False)
    word = instruction_descriptor(dtype, dtype, 128, 32, "s32" if dtype == "s8" else "f32")
    name = KIND.get(dtype, "f8f6f4")
    lines = [mma(name, word, a_at, b_at)]
    for _ in range(3):
        lines += ["add.s64 %d11, %d11, 2; add.s64 %d12, %d12, 2; setp.eq.u32 %p5, 0, 0;"]
        lines += [f"tcgen05.mma.cta_group::1.kind::{name} [%taddr], %d12, %d11, %r21, %p5;"]
    out = run_tensor("\n".join(lines), shared, tensor(), seed=3)[:, :32]
    want = np.zeros(out.shape, np.float32)  # integers below 2^24 are exact, too
    for step in range(4):
        part = slice(step * k, (step + 1) * k)
        want = in_order(a_values[:, part], b_values[:, part], want)
    np.testing.assert_array_equal(out.view(np.int32 if dtype == "s8" else np.float32), want)


def packed(codes, bits):
    """4- and 6-bit elements in shared memory: 16 of them at the start of every 16 bytes (9.7.16.10.4.4)."""
    flat = codes.reshape(-1, 16).astype(np.uint64)
    out = np.zeros((len(flat), 16), np.uint8)
    for i in range(16):
        for bit in range(bits):
            at = i * bits + bit
            out[:, at // 8] |= ((flat[:, i] >> np.uint64(bit) & np.uint64(1)) << np.uint64(at % 8)).astype(np.uint8)
    return out.reshape(codes.shape)


@pytest.mark.parametrize("b", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("a", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_all_pairs_of_narrow_types(a, b):
    rng = np.random.default_rng(7)
    shared = image()
    bits = {"e2m3": 6, "e3m2": 6, "e2m1": 4}
    codes, values, stored = {}, {}, {}
    for side, dtype, rows, start in (("a", a, 128, 0), ("b", b, 16, SHARED // 2)):
        codes[side], values[side] = operand(dtype, rows, 32, rng)
        raw = packed(codes[side], bits[dtype]) if dtype in bits else codes[side]
        stored[side] = store_tile(shared, start, raw, "32", False)
    out = run_tensor(mma("f8f6f4", instruction_descriptor(a, b, 128, 16), stored["a"], stored["b"]), shared, tensor(32))
    np.testing.assert_array_equal(out[:, :16].view(np.float32), in_order(values["a"], values["b"]))


def test_special_values_of_the_formats_reach_the_product():
    shared = image()
    a = np.zeros((128, 32), np.uint8)
    b = np.zeros((8, 32), np.uint8)
    b[:, 0] = 0x38  # 1.0 in e4m3
    a[np.arange(128), 0] = np.arange(128) * 2 + 1
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    out = run_tensor(mma("f8f6f4", instruction_descriptor("e5m2", "e4m3", 128, 8), at, bt), shared, tensor(32))
    np.testing.assert_array_equal(out[:, 0].view(np.float32), TABLES["e5m2"][np.arange(128) * 2 + 1].astype(np.float32))


def test_negation_accumulation_and_scaled_d():
    rng = np.random.default_rng(9)
    shared = image()
    a, av = operand("f16", 128, 16, rng)
    b, bv = operand("f16", 32, 16, rng)
    at, bt = store_tile(shared, 0, a, "none", False), store_tile(shared, SHARED // 2, b, "none", False)
    before = rng.integers(-9, 9, (128, 32)).astype(np.float32)
    for fields, sign in (({"negate_a": 1}, -1), ({"negate_b": 1}, -1), ({"negate_a": 1, "negate_b": 1}, 1)):
        word = instruction_descriptor("f16", "f16", 128, 32, **fields)
        out = run_tensor(mma("f16", word, at, bt, enable=1), shared, before.view(np.uint32))
        assert (out.view(np.float32) == before + sign * (av @ bv.T)).all()
    word = instruction_descriptor("f16", "f16", 128, 32)
    out = run_tensor(mma("f16", word, at, bt, enable=1, rest="{enable}, 3"), shared, before.view(np.uint32))
    assert (out.view(np.float32) == before / 8 + av @ bv.T).all()


def test_f16_accumulators_lie_in_the_lower_halves():
    rng = np.random.default_rng(11)
    shared = image()
    a, av = operand("f16", 128, 16, rng)
    b, bv = operand("f16", 32, 16, rng)
    at, bt = store_tile(shared, 0, a, "64", False), store_tile(shared, SHARED // 2, b, "64", False)
    before = rng.integers(-9, 9, (128, 32)).astype(np.float16)
    word = instruction_descriptor("f16", "f16", 128, 32, "f16")
    out = run_tensor(mma("f16", word, at, bt, enable=1), shared, before.view(np.uint16).astype(np.uint32))
    assert (out.astype(np.uint16).view(np.float16) == (before + av @ bv.T).astype(np.float16)).all()


def test_integers_wrap_or_saturate():
    shared = image()
    a, b = np.full((128, 32), 255, np.uint8), np.full((32, 32), 255, np.uint8)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    before = np.full((128, 32), 2**31 - 1000, np.int64)
    for saturate in (0, 1):
        word = instruction_descriptor("u8", "u8", 128, 32, "s32", saturate=saturate)
        out = run_tensor(mma("i8", word, at, bt, enable=1), shared, before.astype(np.uint32))
        total = before + 255 * 255 * 32
        want = np.minimum(total, 2**31 - 1) if saturate else total
        assert (out == want.astype(np.uint64).astype(np.uint32)).all()


def test_disabled_lanes_keep_their_values():
    rng = np.random.default_rng(13)
    shared = image()
    a, av = operand("bf16", 128, 16, rng)
    b, bv = operand("bf16", 32, 16, rng)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    masks = [0x80000001, 0, 0xFFFFFFFF, 0x10]
    lines = "".join(f"mov.b32 %r{24 + i}, {x};" for i, x in enumerate(masks))
    body = lines + mma(
        "f16", instruction_descriptor("bf16", "bf16", 128, 32), at, bt, rest="{{%r24, %r25, %r26, %r27}}, {enable}"
    )
    out = run_tensor(body, shared, tensor(32))
    off = np.array([masks[i // 32] >> i % 32 & 1 for i in range(128)], bool)
    assert (out[off] == 0x7FC00000).all()
    assert (out[~off].view(np.float32) == (av @ bv.T)[~off]).all()


@pytest.mark.parametrize("dtype", ["f16", "tf32", "e4m3", "e2m1", "e3m2", "u8"])
@pytest.mark.parametrize("m", [128, 64])
def test_a_from_tensor_memory(dtype, m):
    """32 bytes of a row in 8 columns; elements narrower than a byte in bytes, e2m1 in bits 2 to 5 (9.7.16.10.4.3)."""
    rng = np.random.default_rng(17)
    shared = image()
    k = K.get(dtype, 32)
    other = "e4m3" if dtype in ("e2m1", "e3m2") else dtype
    a, av = operand(dtype, m, k, rng)
    b, bv = operand(other, 32, k, rng)
    bt = store_tile(shared, 0, b, "32", False)
    words = tensor(64)
    lanes = np.arange(128) if m == 128 else rows_f()
    raw = a << 2 if dtype == "e2m1" else a
    words[lanes, 32:40] = np.ascontiguousarray(raw).view(np.uint32)
    d = "s32" if dtype == "u8" else "f32"
    body = mma(KIND.get(dtype, "f8f6f4"), instruction_descriptor(dtype, other, m, 32, d), None, bt, a_column=32)
    out = run_tensor(body, shared, words, check=True)
    got = out[lanes, :32].view(np.int32 if d == "s32" else np.float32)
    np.testing.assert_array_equal(got, in_order(av, bv))


def test_half_of_the_lanes_may_start_at_16():
    rng = np.random.default_rng(19)
    shared = image()
    a, av = operand("bf16", 64, 16, rng)
    b, bv = operand("bf16", 32, 16, rng)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    body = "add.u32 %r30, %taddr, 0x100000;" + mma(
        "f16", instruction_descriptor("bf16", "bf16", 64, 32), at, bt, d="%r30"
    )
    out = run_tensor(body, shared, tensor(32))
    assert (out[rows_f(lane=16)].view(np.float32) == av @ bv.T).all()
    assert (out[rows_f()] == 0x7FC00000).all()


@pytest.mark.parametrize("m, n", [(32, 64), (64, 128), (128, 64)])
def test_weight_stationary_layouts(m, n):
    """Layouts G, E and D: a quarter, a half or all of N in each run of M lanes."""
    rng = np.random.default_rng(23)
    shared = image()
    a, av = operand("bf16", m, 16, rng)
    b, bv = operand("bf16", n, 16, rng)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    word = instruction_descriptor("bf16", "bf16", m, n)
    out = run_tensor(mma("f16", word, at, bt, ws=True, modifiers=".collector::b1::fill"), shared, tensor(64))
    parts = 128 // m
    want = np.concatenate(np.split(av @ bv.T, parts, 1))
    assert (out[:, : n // parts].view(np.float32) == want).all()


@pytest.mark.parametrize("options", OPTIONS, ids=["eager", "seed", "checked"])
@pytest.mark.parametrize("m", [256, 128])
def test_a_pair_of_ctas(m, options):
    """Each CTA holds half of the rows of A and half of B; layout A for M 256, layout B (N in halves) for M 128."""
    rng = np.random.default_rng(29)
    n = 64
    a, av = operand("bf16", m, 16, rng)
    b, bv = operand("bf16", n, 16, rng)
    shared = np.stack([image(), image()])
    for i in range(2):
        at = store_tile(shared[i], 0, a[i * m // 2 : (i + 1) * m // 2], "128", False)
        bt = store_tile(shared[i], SHARED // 2, b[i * n // 2 : (i + 1) * n // 2], "128", False)
    body = mma("f16", instruction_descriptor("bf16", "bf16", m, n), at, bt, group=2)
    out = run_tensor(body, shared, tensor(64, 2), 2, **options)
    for i, want in enumerate(np.split(av @ bv.T, 2)):
        if m == 256:
            assert (out[i].view(np.float32) == want).all()
        else:
            assert (out[i, :64, :32].view(np.float32) == want[:, :32]).all()
            assert (out[i, 64:, :32].view(np.float32) == want[:, 32:]).all()
            assert (out[i, :, 32:] == 0x7FC00000).all()


def test_a_pair_with_a_in_tensor_memory_reads_the_lanes_it_writes():
    """M 128 in a pair: both runs of 64 lanes hold A's rows (CuTe: the duplicated allocation of tmem_frg_2sm)."""
    rng = np.random.default_rng(31)
    a, av = operand("bf16", 128, 16, rng)
    b, bv = operand("bf16", 64, 16, rng)
    shared = np.stack([image(), image()])
    words = tensor(64, 2)
    for i in range(2):
        bt = store_tile(shared[i], 0, b[i * 32 : (i + 1) * 32], "32", False)
        words[i, :, 32:40] = np.tile(np.ascontiguousarray(a[i * 64 : (i + 1) * 64]).view(np.uint32), (2, 1))
    body = mma("f16", instruction_descriptor("bf16", "bf16", 128, 64), None, bt, group=2, a_column=32)
    out = run_tensor(body, shared, words, 2)
    for i, want in enumerate(np.split(av @ bv.T, 2)):
        assert (out[i, :64, :32].view(np.float32) == want[:, :32]).all()
        assert (out[i, 64:, :32].view(np.float32) == want[:, 32:]).all()


def scale_words(values, factors):
    """Scale factor codes (rows, factors) as words: row r in lane r % 32, column r // 32, the same in every 32 lanes."""
    rows = len(values)
    columns = -(-rows // 32)
    words = np.zeros((32, columns, 4), np.uint8)
    for r in range(rows):
        words[r % 32, r // 32, :factors] = values[r]
    return np.tile(words.reshape(32, columns * 4).view(np.uint32), (4, 1))


def ue8m0(codes):
    return 2.0 ** (codes.astype(np.float64) - 127)


SCALED = [
    ("mxf8f6f4", "scale_vec::1X", 1, "ue8m0"),
    ("mxf8f6f4", "block32", 1, "ue8m0"),
    ("mxf4", "scale_vec::2X", 2, "ue8m0"),
    ("mxf4nvf4", "block32", 2, "ue8m0"),
    ("mxf4nvf4", "scale_vec::4X", 4, "ue4m3"),
    ("mxf4nvf4", "block16", 4, "ue8m0"),
]


def scaled_operand(kind, rows, rng):
    """Codes as bytes of shared memory (rows, 32) and values (rows, k)."""
    if kind == "mxf8f6f4":
        return operand("e4m3", rows, 32, rng)
    codes, values = operand("e2m1", rows, 64, rng)
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), values


@pytest.mark.parametrize("group, m, n", [(1, 128, 64), (1, 128, 256), (2, 256, 128), (2, 128, 128)])
@pytest.mark.parametrize("kind, size, factors, stype", SCALED)
def test_block_scaling(kind, size, factors, stype, group, m, n):
    rng = np.random.default_rng(37)
    k = 32 if kind == "mxf8f6f4" else 64
    pick_scales = (
        (lambda rows: rng.integers(124, 131, (rows, factors)))
        if stype == "ue8m0"
        else (lambda rows: rng.integers(0x28, 0x50, (rows, factors)))
    )
    worth = ue8m0 if stype == "ue8m0" else (lambda c: TABLES["e4m3"][c])
    a, av = scaled_operand(kind, m, rng)
    b, bv = scaled_operand(kind, n, rng)
    sa, sb = pick_scales(m), pick_scales(n)
    want = in_order(av * np.repeat(worth(sa), k // factors, 1), bv * np.repeat(worth(sb), k // factors, 1))
    shared = np.stack([image() for _ in range(group)])
    words = tensor(320, group).reshape(group, 128, 320)
    for i in range(group):
        at = store_tile(shared[i], 0, a[i * m // group : (i + 1) * m // group], "32", False)
        bt = store_tile(shared[i], SHARED // 2, b[i * n // group : (i + 1) * n // group], "32", False)
        sa_words = scale_words(sa[i * m // group : (i + 1) * m // group], factors)
        words[i, :, 256 : 256 + sa_words.shape[1]] = sa_words
        if group == 2 and m == 128:  # layout B: the factors of a half of N in the lanes that compute it
            for half in range(2):
                part = scale_words(sb[half * n // 2 : (half + 1) * n // 2], factors)
                words[i, 64 * half : 64 * half + 64, 288 : 288 + part.shape[1]] = part[:64]
        else:
            sb_words = scale_words(sb, factors)
            words[i, :, 288 : 288 + sb_words.shape[1]] = sb_words
    code = {"mxf8f6f4": 0}.get(kind, 1)
    word = code << 7 | code << 10 | n >> 3 << 17 | (stype == "ue8m0") << 23 | m >> 7 << 27
    body = "add.u32 %r30, %taddr, 256; add.u32 %r31, %taddr, 288;" + mma(
        kind, word, at, bt, group=group, modifiers=f".block_scale.{size}", rest="[%r30], [%r31], {enable}"
    )
    out = run_tensor(body, shared if group == 2 else shared[0], words if group == 2 else words[0], group, check=True)
    out = out.reshape(group, 128, 320)
    for i, part in enumerate(np.split(want, group)):
        if group == 2 and m == 128:
            part = np.concatenate(np.split(part, 2, 1))
        np.testing.assert_array_equal(out[i, :, : part.shape[1]].view(np.float32), part)


@pytest.mark.parametrize("identifier", [0, 1, 2, 3])
def test_scale_factor_ids_pick_the_byte(identifier):
    """scale_vec::1X: byte `id` of the word; programs also repeat it in bits 30 and 31 of the address."""
    rng = np.random.default_rng(41)
    shared = image()
    a, av = operand("e4m3", 128, 32, rng)
    b, bv = operand("e4m3", 32, 32, rng)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, b, "32", False)
    sa, sb = rng.integers(124, 131, (128, 4)), rng.integers(124, 131, (32, 4))
    words = tensor(64)
    words[:, 32:36], words[:, 40:41] = scale_words(sa, 4), scale_words(sb, 4)
    word = 32 >> 3 << 17 | 1 << 23 | 1 << 27 | identifier << 29 | identifier << 4
    body = f"add.u32 %r30, %taddr, {32 | identifier << 30}; add.u32 %r31, %taddr, {40 | identifier << 30};" + mma(
        "mxf8f6f4", word, at, bt, modifiers=".block_scale.scale_vec::1X", rest="[%r30], [%r31], {enable}"
    )
    out = run_tensor(body, shared, words)[:, :32].view(np.float32)
    np.testing.assert_array_equal(out, in_order(av * ue8m0(sa[:, [identifier]]), bv * ue8m0(sb[:, [identifier]])))


def test_scale_factors_have_to_be_in_all_lanes():
    shared = image()
    a = np.zeros((128, 32), np.uint8)
    at, bt = store_tile(shared, 0, a, "32", False), store_tile(shared, SHARED // 2, a[:32], "32", False)
    words = tensor(64, fill=0)
    words[70, 40] = 1
    word = 32 >> 3 << 17 | 1 << 23 | 1 << 27
    body = "add.u32 %r30, %taddr, 32; add.u32 %r31, %taddr, 40;" + mma(
        "mxf8f6f4", word, at, bt, modifiers=".block_scale.block32", rest="[%r30], [%r31], {enable}"
    )
    with pytest.raises(PtxError, match="factors of column 6 differ"):
        run_tensor(body, shared, words)


BAD = [
    (instruction_descriptor("f16", "f16", 128, 64) | 4, "sparse A is not supported"),
    (instruction_descriptor("f16", "f16", 96, 64), "M = 96, N = 64 does not exist"),
    (instruction_descriptor("f16", "f16", 256, 64), "M = 256, N = 64 does not exist"),
    (instruction_descriptor("f16", "f16", 128, 0), "N = 0 does not exist"),
    (instruction_descriptor("f16", "f16", 128, 64) | 2 << 7, "atype 2 does not belong"),
    (instruction_descriptor("f16", "f16", 128, 64) | 8, "saturation"),
    (instruction_descriptor("f16", "f16", 128, 64, "s32"), "dtype 2 does not belong"),
    (instruction_descriptor("bf16", "bf16", 128, 64, "f16"), "dtype F16 is not for BF16"),
]


@pytest.mark.parametrize("word, message", BAD)
def test_bad_instruction_descriptors(word, message):
    shared = image()
    at, bt = (
        store_tile(shared, 0, np.zeros((128, 16), np.uint16), "32", False),
        store_tile(shared, 8192, np.zeros((64, 16), np.uint16), "32", False),
    )
    with pytest.raises(PtxError, match=message):
        run_tensor(mma("f16", word, at, bt), shared, tensor(64))


def test_matrices_have_to_lie_in_shared_memory():
    shared = image()
    at, bt = (
        store_tile(shared, 0, np.zeros((128, 16), np.uint16), "32", False),
        store_tile(shared, 8192, np.zeros((64, 16), np.uint16), "32", False),
    )
    body = mma("f16", instruction_descriptor("f16", "f16", 128, 64), at, bt).replace("%d12;", "%d12;") + ""
    body = body.replace(
        f"add.s64 %d12, %d10, {at.tcgen05()};", f"add.s64 %d12, %d10, {at.tcgen05() + SHARED // 16 - 8};"
    )
    with pytest.raises(PtxError, match="matrix in shared memory of CTA 0: chunk at"):
        run_tensor(body, shared, tensor(64))
    with pytest.raises(PtxError, match="bits 46-48"):
        run_tensor(body.replace(str(bt.tcgen05()), str(bt.tcgen05() & ~(7 << 46))), shared, tensor(64))
    with pytest.raises(PtxError, match="base offset"):
        run_tensor(body.replace(str(bt.tcgen05()), str(bt.tcgen05() | 1 << 49)), shared, tensor(64))
