"""Tensor copies (PTX ISA 9.7.9.27.1): boxes, fill, swizzles, packed types, multicast, gather4, stores, reductions."""

import itertools

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from torch_attnkit.sim import _ptx as machine

from .async_pieces import CLUSTER, HEAD, INIT, aligned, expect, move, wait
from .snippet import run

pytestmark = pytest.mark.simulator
SEEDS = [0, 1, 2, 3]
PROXY = "fence.proxy.async.shared::cta; bar.sync 0;\n"
BYTES = "mbarrier::complete_tx::bytes"
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\n"
# CUtensorMapDataType and CUtensorMapSwizzle.
TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "f32.ftz": 10,
    "tf32": 11, "b4x16": 13, "b4x16_p64": 14, "b6x16_p32": 15,
}  # fmt: skip
SWIZZLES = {"none": 0, "32": 1, "64": 2, "128": 3, "128/32": 4, "128/32/8": 5, "128/64": 6}


def tensor_map(kind, array, sizes, strides, box, steps=None, **options):
    """The 128 bytes of a map whose base is the array's first byte. ``strides``: bytes, of dimensions 1 and up."""
    out = aligned(128)
    steps = steps or [1] * len(sizes)
    code = machine.tensor_map_encode(TYPES[kind], array.ctypes.data, sizes, strides, box, steps, **options)
    out[:] = np.frombuffer(code, np.uint8)
    return out


def load(coordinates, nbytes, shared=None, offset=0, tail=""):
    """Loads one box into data + offset and copies it to %in2: its ``nbytes``, or ``shared`` bytes cleared before."""
    dims = len(coordinates)
    x = ", ".join(str(c) for c in coordinates)
    return (
        HEAD
        + INIT
        + (move("CLEAR", shared, "%in2", out=False) + PROXY if shared else "")
        + expect(nbytes)
        + f"""
        @%p0 cp.async.bulk.tensor.{dims}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [data+{offset}], [%in0, {{{x}}}], [mb];
        """
        + wait("W")
        + tail
        + move("OUT", shared or nbytes, "%in2", out=True, offset=offset)
    )


def box_of(tensor, coordinates, box, steps, fill):
    """What a box holds: numpy's view of the tensor (dimension 0 last), one element at a time."""
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    out = np.full(counts[::-1], fill, tensor.dtype)
    for index in itertools.product(*(range(n) for n in counts)):
        at = [c + i * (s if d else 1) for d, (c, i, s) in enumerate(zip(coordinates, index, steps, strict=True))]
        if all(0 <= a < n for a, n in zip(at, tensor.shape[::-1], strict=True)):
            out[index[::-1]] = tensor[tuple(at[::-1])]
    return out


CASES = [
    # dtype, sizes, box, coordinates, element strides (dimension 0 first)
    (np.uint8, (100,), (64,), (48,), (1,)),
    (np.float16, (40, 9), (16, 4), (8, 3), (1, 1)),
    (np.float32, (24, 10), (8, 4), (-3, -2), (1, 1)),
    (np.float32, (24, 10), (8, 8), (20, 7), (1, 1)),
    (np.int32, (12, 5, 4), (8, 3, 2), (2, 4, -1), (1, 1, 1)),
    (np.uint64, (6, 5, 4, 3), (4, 2, 3, 2), (-1, 4, 2, 1), (1, 1, 1, 1)),
    (np.uint16, (16, 3, 4, 3, 5), (8, 2, 2, 2, 3), (12, -1, 3, 0, 4), (1, 1, 1, 1, 1)),
    (np.uint16, (16, 12, 7), (8, 5, 4), (4, 3, 1), (1, 2, 3)),
    (np.float32, (8, 6), (4, 6), (100, 100), (1, 1)),
]


def pitched(dtype, sizes, rng):
    """A tensor whose rows and planes are padded to 16 bytes and 16 more, and its byte strides."""
    itemsize = np.dtype(dtype).itemsize
    strides, step = [], -(-sizes[0] * itemsize // 16) * 16 + 16
    for n in sizes[1:]:
        strides.append(step)
        step = step * n + 16
    memory = aligned(step)
    memory[:] = rng.integers(1, 200, memory.size)
    view = np.ndarray(sizes[::-1], dtype, memory, strides=(*strides[::-1], itemsize))
    values = rng.integers(1, 100, sizes[::-1])
    view[...] = values.astype(dtype)
    return memory, view, strides


KINDS = {"uint8": "u8", "uint16": "u16", "int32": "s32", "uint64": "u64", "float16": "f16", "float32": "f32"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=[f"{len(c[1])}d-{np.dtype(c[0])}-{n}" for n, c in enumerate(CASES)])
def test_boxes_at_every_rank(case, seed):
    dtype, sizes, box, coordinates, steps = case
    memory, tensor, strides = pitched(dtype, sizes, np.random.default_rng(1))
    descriptor = tensor_map(KINDS[str(np.dtype(dtype))], memory, list(sizes), strides, list(box), list(steps))
    want = box_of(tensor, coordinates, box, steps, 0)
    out = aligned(want.nbytes)
    result = run(load(coordinates, want.nbytes), descriptor, memory, out, seed=seed)
    assert (out.view(dtype).reshape(want.shape) == want).all()
    assert result.counters["tma_read"] == want.nbytes


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("f32", np.float32), ("f64", np.float64)])
def test_nan_fill(kind, dtype):
    memory, tensor, strides = pitched(dtype, (16, 4), np.random.default_rng(2))
    descriptor = tensor_map(kind, memory, [16, 4], strides, [8, 2], fill=1)
    want = box_of(tensor, (12, 3), (8, 2), (1, 1), np.nan)
    out = aligned(want.nbytes)
    run(load((12, 3), want.nbytes), descriptor, memory, out)
    np.testing.assert_array_equal(out.view(dtype).reshape(want.shape), want)


def test_ftz_and_tf32_convert_while_loading():
    memory = aligned(8, np.float32)
    memory[:] = [1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 3 * 2**-11, 1e-40, -1e-40, np.inf, 0, 2**-126]
    for kind, want in {
        "tf32": [1 + 2**-10, 1, -1 - 2**-9, 1e-40, -1e-40, np.inf, 0, 2**-126],
        "f32.ftz": [*memory[:3], 0, -0.0, np.inf, 0, 2**-126],
    }.items():
        out = aligned(8, np.float32)
        run(load((0,), 32), tensor_map(kind, memory, [8], [], [8]), memory, out)
        got, expected = out.copy(), np.array(want, np.float32)
        if kind == "tf32":  # 1e-40 keeps 10 bits of the format's own exponent
            got[3:5] = expected[3:5] = 0
        assert (got == expected).all()
        assert (np.signbit(out) == np.signbit(np.array(want, np.float32))).all()


# The tables of PTX ISA 5.5.7: line by line, which 16-byte element lies in each of the eight places of a 128-byte line.
TABLES = {
    "none": ["01234567"],
    "32": ["01234567", "10325476"],
    "64": ["01234567", "10325476", "23016745", "32107654"],
    "128": ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    "128/32": ["01234567", "23016745", "45670123", "67452301"],
    "128/32/8": ["01234567", "23016745", "45670123", "67452301"],
    "128/64": ["01234567", "45670123"],
}


def swizzle(plain, mode, first_line):
    """Plain lines of 128 bytes as the table lays them out, starting in the given line of the pattern."""
    lines = plain.reshape(-1, 8, 16)
    out = np.empty_like(lines)
    for n, line in enumerate(lines):
        row = TABLES[mode][(n + first_line) % len(TABLES[mode])]
        for column, element in enumerate(row):
            cell = line[int(element)]
            # 8-byte flip: adjacent halves of each 16 bytes change places in every other line.
            out[n, column] = np.roll(cell, 8) if mode == "128/32/8" and (n + first_line) % 2 else cell
    return out.reshape(-1)


WIDTH = {"none": 128, "32": 32, "64": 64, "128": 128, "128/32": 128, "128/32/8": 128, "128/64": 128}


@pytest.mark.parametrize("line", [0, 1, 3, 6])
@pytest.mark.parametrize("mode", SWIZZLES)
def test_swizzles(mode, line):
    # Rows as wide as the swizzle. In a load the box goes to line `line` of the pattern; a store takes it back.
    width, rows = WIDTH[mode], 2048 // WIDTH[mode]
    memory, back = aligned((rows, width)), aligned((rows, width))
    memory[...] = np.random.default_rng(3).integers(0, 256, memory.shape)
    offset = 128 * line
    options = {"swizzle": SWIZZLES[mode]}
    descriptor = tensor_map("u8", memory, [width, rows], [width], [width, rows], **options)
    to = tensor_map("u8", back, [width, rows], [width], [width, rows], **options)
    out = aligned(2048)
    tail = f"""
        @%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%in3, {{0, 0}}], [data+{offset}];
        {DONE}
        """
    run(load((0, 0), 2048, offset=offset, tail=tail), descriptor, memory, out, to, back)
    assert (out == swizzle(memory.reshape(-1), mode, line)).all()
    assert (back == memory).all()


def test_a_row_narrower_than_its_swizzle_takes_the_whole_span():
    # 32 bytes of each 128-byte line; the bytes that count are those of the box.
    memory = aligned((8, 32))
    memory[...] = np.random.default_rng(4).integers(0, 256, memory.shape)
    descriptor = tensor_map("u8", memory, [32, 8], [32], [32, 8], swizzle=SWIZZLES["128"])
    out = aligned(1024)
    run(load((0, 0), 256, 1024), descriptor, memory, out)
    lines = np.zeros((8, 128), np.uint8)
    lines[:, :32] = memory
    assert (out == swizzle(lines.reshape(-1), "128", 0)).all()


def test_packed_four_bit_types():
    # b4x16 is copied as it is; b4x16_p64 gets eight bytes of room after every eight. Both count the bytes in memory.
    memory = aligned((4, 128))
    memory[...] = np.random.default_rng(6).integers(0, 256, memory.shape)
    out = aligned((2, 64))
    run(load((128, 1), 128), tensor_map("b4x16", memory, [256, 4], [128], [128, 2]), memory, out)
    assert (out == memory[1:3, 64:]).all()
    for mode in ("none", "128", "128/32", "128/64"):
        out = aligned((2, 8, 16))
        padded = tensor_map("b4x16_p64", memory, [256, 4], [128], [128, 2], swizzle=SWIZZLES[mode])
        run(load((128, 1), 128, 256), padded, memory, out)
        want = np.zeros((2, 8, 16), np.uint8)
        want[:, :, :8] = memory[1:3, 64:].reshape(2, 8, 8)
        assert (out.reshape(-1) == swizzle(want.reshape(-1), mode, 0)).all(), mode


def test_packed_six_bit_type():
    # 16 elements are 12 bytes in memory and 16 in shared memory.
    memory = aligned((3, 192))
    memory[...] = np.random.default_rng(7).integers(0, 256, memory.shape)
    out = aligned((2, 8, 16))
    padded = tensor_map("b6x16_p32", memory, [256, 3], [192], [128, 2])
    run(load((128, 2), 192, 256), padded, memory, out)
    want = np.zeros((2, 8, 16), np.uint8)
    want[0, :, :12] = memory[2, 96:].reshape(8, 12)  # the box's second row is outside
    assert (out == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast(seed):
    # Rank 1 of 4 sends one box to ranks 0, 1 and 3; each has its own barrier at the same offset.
    memory = aligned((8, 64), np.uint8)
    memory[...] = np.random.default_rng(8).integers(0, 256, memory.shape)
    descriptor = tensor_map("u8", memory, [64, 8], [64], [32, 4])
    out = aligned((4, 128))
    body = HEAD + INIT + CLUSTER + """
        mov.u32 %r1, %cluster_ctarank;
        mul.lo.u32 %r2, %r1, 128;
        cvt.u64.u32 %d1, %r2;
        add.u64 %d1, %d1, %in2;
        setp.eq.u32 %p1, %r1, 2;
        @%p1 bra END;
        """ + expect(128) + """
        setp.eq.u32 %p2, %r1, 1;
        and.pred %p2, %p2, %p0;
        mov.b16 %h0, 0xb;
        mov.u32 %r5, 16; mov.u32 %r6, 2;
        @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [data], [%in0, {%r5, %r6}], [mb], %h0;
        """ + wait("W") + move("OUT", 128, "%d1", out=True) + "END:" + CLUSTER  # fmt: skip
    run(body, descriptor, memory, out, grid=4, cluster=4, seed=seed)
    want = memory[2:6, 16:48].reshape(-1)
    for rank in (0, 1, 3):
        assert (out[rank] == want).all(), rank
    assert (out[2] == 0).all()


# Of a CTA pair the even CTA's barrier is named by clearing the lowest bit of the rank in the address.
PAIR = (
    HEAD
    + INIT
    + """
    mov.u32 %r1, %cluster_ctarank;
    mul.lo.u32 %r2, %r1, 64;
    cvt.u64.u32 %d1, %r2;
    add.u64 %d1, %d1, %in2;
    mov.u32 %r4, mb;
    and.b32 %r4, %r4, 0xFEFFFFFF;
    and.b32 %r3, %r1, 1;
    setp.eq.u32 %p1, %r3, 0;
    and.pred %p2, %p0, %p1;
    """
)


@pytest.mark.parametrize("seed", SEEDS)
def test_cta_pair_signals_one_barrier(seed):
    memory = aligned((2, 64))
    memory[...] = np.random.default_rng(9).integers(0, 256, memory.shape)
    descriptor = tensor_map("u8", memory, [64, 2], [64], [64, 1])
    out = aligned((2, 64))
    body = PAIR + expect(128).replace("%p0", "%p2") + CLUSTER + """
        @%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.cta_group::2
            [data], [%in0, {0, %r1}], [%r4];
        @!%p1 bra SKIP;
        """ + wait("W") + "SKIP:" + CLUSTER + move("OUT", 64, "%d1", out=True) + CLUSTER  # fmt: skip
    run(body, descriptor, memory, out, grid=2, cluster=2, seed=seed)
    assert (out == memory).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_cta_pairs_and_multicast(seed):
    # Each of four CTAs sends 16 bytes to the two CTAs of its parity: 32 bytes for each, 64 for a pair's barrier.
    memory = aligned((2, 64))
    memory[...] = np.random.default_rng(9).integers(0, 256, memory.shape)
    descriptor = tensor_map("u8", memory, [64, 2], [64], [16, 1])
    out = aligned((4, 64))
    body = PAIR + expect(64).replace("%p0", "%p2") + CLUSTER + """
        mov.u32 %r10, 0x5;
        mov.u32 %r11, 0xa;
        selp.b32 %r12, %r10, %r11, %p1;
        cvt.u16.u32 %h0, %r12;
        shr.u32 %r5, %r1, 1;
        mul.lo.u32 %r6, %r5, 16;
        mul.lo.u32 %r9, %r5, 128;
        mov.u32 %r8, data;
        add.u32 %r8, %r8, %r9;
        """ + f"""
        @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.{BYTES}.multicast::cluster.cta_group::2
            [%r8], [%in0, {{%r6, %r3}}], [%r4], %h0;
        @!%p1 bra SKIP;
        """ + wait("W") + "SKIP:" + CLUSTER  # fmt: skip
    body += move("A", 16, "%d1", out=True) + "add.u64 %d1, %d1, 16;" + move("B", 16, "%d1", out=True, offset=128)
    run(body + CLUSTER, descriptor, memory, out, grid=4, cluster=4, seed=seed)
    for rank in range(4):
        assert (out[rank, :32] == memory[rank % 2, :32]).all(), rank


@pytest.mark.parametrize("seed", SEEDS)
def test_gather4(seed):
    memory, tensor, strides = pitched(np.float16, (40, 12), np.random.default_rng(10))
    descriptor = tensor_map("f16", memory, [40, 12], strides, [16, 1])
    out = aligned((4, 16), np.float16)
    body = HEAD + INIT + expect(128) + """
        mov.u32 %r1, 32; mov.u32 %r2, 7; mov.u32 %r3, 0; mov.u32 %r4, 12; mov.u32 %r5, 7;
        @%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
            [data], [%in0, {%r1, %r2, %r3, %r4, %r5}], [mb];
        """ + wait("W") + move("OUT", 128, "%in2", out=True)  # fmt: skip
    run(body, descriptor, memory, out, seed=seed)
    want = np.zeros((4, 16), np.float16)
    want[[0, 1, 3], :8] = tensor[[7, 0, 7], 32:]
    assert (out == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_scatter4(seed):
    memory, tensor, strides = pitched(np.float32, (10, 6), np.random.default_rng(11))
    source = aligned((4, 4), np.float32)
    source[...] = np.arange(16).reshape(4, 4) + 1000
    descriptor = tensor_map("f32", memory, [10, 6], strides, [4, 1])
    before = tensor.copy()
    body = HEAD + move("IN", 64, "%in2", out=False) + PROXY + """
        mov.u32 %r1, 8; mov.u32 %r2, 5; mov.u32 %r3, 2; mov.u32 %r4, 6; mov.u32 %r5, 0;
        @%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group
            [%in0, {%r1, %r2, %r3, %r4, %r5}], [data];
        """ + DONE  # fmt: skip
    run(body, descriptor, memory, source, seed=seed)
    want = before
    want[[5, 2, 0], 8:] = source[[0, 1, 3], :2]
    assert (tensor == want).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("everyone", ["@%p0 ", ""])
def test_stores_leave_the_outside_alone(everyone, seed):
    # The same with one thread and with all 32: identical lanes store once.
    memory, tensor, strides = pitched(np.uint16, (20, 5, 3), np.random.default_rng(12))
    before = memory.copy()
    source = aligned((2, 4, 8), np.uint16)
    source[...] = np.arange(64).reshape(2, 4, 8) + 5000
    descriptor = tensor_map("u16", memory, [20, 5, 3], strides, [8, 4, 2])
    body = (
        HEAD
        + move("IN", 128, "%in2", out=False)
        + PROXY
        + f"""
        {everyone}cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%in0, {{16, 2, 2}}], [data];
        """
        + DONE
    )
    result = run(body, descriptor, memory, source, seed=seed)
    want = tensor.copy()
    assert (want[2, 2:5, 16:20] == source[0, :3, :4]).all()
    changed = np.zeros(tensor.shape, bool)
    changed[2, 2:5, 16:20] = True
    restored = before.view()
    old = np.ndarray(tensor.shape, np.uint16, restored, strides=tensor.strides)
    assert (tensor[~changed] == old[~changed]).all()
    assert result.counters["tma_transactions"] == 1
    assert result.counters["tma_written"] == 3 * 4 * 2


REDUCTIONS = [
    ("add", "u32", np.uint32), ("add", "s32", np.int32), ("add", "u64", np.uint64), ("add", "f32", np.float32),
    ("add", "f16", np.float16), ("min", "s32", np.int32), ("max", "u32", np.uint32), ("min", "s64", np.int64),
    ("max", "f16", np.float16), ("inc", "u32", np.uint32), ("dec", "u32", np.uint32), ("and", "u32", np.uint32),
    ("or", "u64", np.uint64), ("xor", "s32", np.int32),
]  # fmt: skip
OPERATIONS = {
    "add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "inc": lambda a, b: np.where(a >= b, 0, a + 1),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("operation", "kind", "dtype"), REDUCTIONS)
def test_reductions(operation, kind, dtype, seed):
    rng = np.random.default_rng(13)
    memory, tensor, strides = pitched(dtype, (12, 6), rng)
    source = aligned((4, 8), dtype)
    source[...] = rng.integers(0 if np.dtype(dtype).kind == "u" else -90, 90, (4, 8)).astype(dtype)
    want = tensor.copy()
    want[3:6, 4:12] = OPERATIONS[operation](tensor[3:6, 4:12], source[:3]).astype(dtype)
    descriptor = tensor_map(kind, memory, [12, 6], strides, [8, 4])
    body = (
        HEAD
        + move("IN", source.nbytes, "%in2", out=False)
        + PROXY
        + f"""
        @%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%in0, {{4, 3}}], [data];
        """
        + DONE
    )
    run(body, descriptor, memory, source, seed=seed)
    assert (tensor == want).all()


def test_a_reduction_counts_every_lane():
    memory, source = aligned(4, np.uint32, fill=1), aligned(4, np.uint32, fill=3)
    descriptor = tensor_map("u32", memory, [4], [], [4])
    body = HEAD + move("IN", 16, "%in2", out=False) + PROXY
    body += "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%in0, {0}], [data];" + DONE
    run(body, descriptor, memory, source)
    assert (memory == 1 + 32 * 3).all()


def test_prefetches():
    """A hint: it is counted, moves nothing and needs no wait; but what it names has to be a tensor map."""
    memory = aligned((4, 64))
    memory[...] = np.arange(256, dtype=np.uint8).reshape(4, 64)
    before = memory.copy()
    descriptor = tensor_map("u8", memory, [64, 4], [64], [32, 1])
    body = """
        @%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%in0, {0, 0}];
        @%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [%in0, {0, 0, 1, 2, 3}];
        prefetch.tensormap [%in0];
        """
    result = run(HEAD + body, descriptor, memory, check=True)
    counted = result.counters
    assert (counted["by_opcode"]["cp"], counted["by_opcode"]["prefetch"]) == (2, 1)
    assert (counted["tma_read"], counted["tma_written"]) == (0, 0) and not result.reports
    assert (memory == before).all()
    for name in ("tile [%in1, {0, 0}]", "tile::gather4 [%in1, {0, 0, 1, 2, 3}]"):
        with pytest.raises(PtxError, match="tensor map"):
            run(f"{HEAD}@%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.{name};", descriptor, memory)


def test_without_the_wait_some_schedule_shows_it():
    memory = aligned((16, 64))
    memory[...] = np.random.default_rng(14).integers(0, 256, memory.shape)
    descriptor = tensor_map("u8", memory, [64, 16], [64], [64, 16])
    wrong = 0
    for seed in range(1, 21):
        out = aligned((16, 64))
        body = load((0, 0), 1024)
        run(body.replace(wait("W"), "bar.sync 0;"), descriptor, memory, out, seed=seed)
        wrong += not (out == memory).all()
    assert wrong > 0


# --- misuse


def test_maps_are_validated_when_they_are_made():
    memory = aligned(4096)
    at = memory.ctypes.data
    rules = {
        "base address is not aligned to 16": (0, at + 8, [64], [], [64], [1]),
        "base address is not aligned to 32": (14, at + 16, [128, 4], [64], [128, 1], [1, 1]),
        "stride of dimension 1": (0, at, [64, 4], [72], [64, 1], [1, 1]),
        "no multiple of 16 bytes": (1, at, [64], [], [4], [1]),
        "box of dimension 0 is 512": (0, at, [1024], [], [512], [1]),
        "size of dimension 1 is 0": (0, at, [64, 0], [64], [64, 1], [1, 1]),
        "element stride of dimension 1 is 9": (0, at, [64, 4], [64], [64, 1], [1, 9]),
        "rank 6": (0, at, [16] * 6, [16] * 5, [16] * 6, [1] * 6),
        "a box of 128 elements": (14, at, [128, 4], [64], [64, 1], [1, 1]),
    }
    for message, arguments in rules.items():
        with pytest.raises(PtxError, match=message):
            machine.tensor_map_encode(*arguments)
    for message, options in {
        "wider than the swizzle of 32": {"swizzle": 1},
        "NaN fill with elements of u8": {"fill": 1},
        "interleaved layouts are not supported": {"interleave": 1},
        "outside its enumeration": {"swizzle": 7},
    }.items():
        with pytest.raises(PtxError, match=message):
            machine.tensor_map_encode(0, at, [64], [], [64], [1], **options)


def test_the_codec_is_its_own_inverse():
    rng = np.random.default_rng(15)
    for kind, number in TYPES.items():
        sizes, strides, box = [256, 7, 5], [512, 8192], [128, 3, 2]
        if kind in ("u32", "s32", "f32", "f32.ftz", "tf32"):
            box[0] = 32
        if kind in ("u64", "s64", "f64"):
            box[0] = 16
        steps = [1, int(rng.integers(1, 9)), int(rng.integers(1, 9))]
        code = machine.tensor_map_encode(number, 1 << 40, sizes, strides, box, steps, swizzle=0, promotion=2)
        fields = machine.tensor_map_decode(code)
        assert fields["address"] == 1 << 40
        assert fields["element"] == kind
        assert (fields["sizes"], fields["strides"], fields["box"], fields["steps"]) == (sizes, strides, box, steps)
        assert (fields["swizzle"], fields["promotion"], fields["fill"], fields["invalid"]) == (0, 2, "zero", "")


MISUSE = {
    "rank": ("3d", "{0, 0, 0}", "data", "mb", "rank 2, the instruction 3"),
    "shared alignment": ("2d", "{0, 0}", "data+64", "mb", "not aligned to 128"),
    "shared bounds": ("2d", "{0, 0}", "data+65536", "mb", "outside the CTA's shared memory"),
    "mbarrier": ("2d", "{0, 0}", "data", "mb+8", "before mbarrier.init"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name, seed):
    dims, coordinates, to, barrier, message = MISUSE[name]
    memory = aligned((16, 64))
    descriptor = tensor_map("u8", memory, [64, 16], [64], [64, 8])
    body = (
        HEAD
        + INIT
        + f"""
        @%p0 cp.async.bulk.tensor.{dims}.shared::cta.global.tile.{BYTES}
            [{to}], [%in0, {coordinates}], [{barrier}];
        """
    )
    with pytest.raises(PtxError, match=message):
        run(body, descriptor, memory, seed=seed)


def test_more_misuse():
    memory = aligned((16, 64))
    body = load((0, 0), 512)
    beyond = tensor_map("u8", memory, [64, 17], [64], [64, 8])  # one row more than there is memory
    out = aligned(512)
    run(body, beyond, memory, out)
    with pytest.raises(PtxError, match="reads 64 bytes at global address"):
        run(load((0, 9), 512), beyond, memory, out)
    with pytest.raises(PtxError, match="not aligned to 64"):
        run(body.replace("[%in0,", "[%in0+16,"), aligned(256), memory, out)
    with pytest.raises(PtxError, match="the tensor map is invalid"):
        run(body, aligned(128, fill=0xFF), memory, out)
    good = tensor_map("u8", memory, [64, 16], [64], [64, 8])
    with pytest.raises(PtxError, match="negative"):
        run(HEAD + STORE + ".bulk_group [%in0, {0, -1}], [data];", good, memory)
    with pytest.raises(PtxError, match="no form for elements of u8"):
        run(
            HEAD + "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%in0, {0, 0}], [data];",
            good,
            memory,
        )
    with pytest.raises(PtxError, match="need a box of one row"):
        run(
            HEAD + STORE + ".tile::scatter4.bulk_group [%in0, {0, 0, 1, 2, 3}], [data];",
            good,
            memory,
        )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            f"{LOAD}.im2col.{BYTES} [data], [%in0, {{0, 0}}], [mb], {{%h0}};".replace(".tile", ""),
            "im2col is not supported",
        ),
        (f"{LOAD}.{BYTES} [data], [%in0, {{0}}], [mb];", "1 coordinates"),
        (f"{LOAD}::gather4.{BYTES} [data], [%in0, {{0, 0, 0, 0, 0}}], [mb];".replace("2d", "3d"), "2d tensors"),
        (f"{LOAD}.frob.{BYTES} [data], [%in0, {{0, 0}}], [mb];", "frob"),
        (f"{STORE}.tile.{BYTES} [%in0, {{0, 0}}], [data];", "bulk_group"),
    ],
)
def test_forms_that_do_not_exist(form, message):
    with pytest.raises(PtxError, match=message):
        run(HEAD + form, aligned(128))


@pytest.mark.parametrize("d", [0, 1])
def test_a_dimension_of_size_0_is_refused_as_a_gpu_does(d):
    """Compilers encode size - 1 in 32 bits, so that 0 reads as 2^32: an H200 calls it an illegal instruction."""
    x = aligned((8, 64), np.uint8, fill=3)
    tmap = tensor_map("u8", x, [64, 8], [64], [64, 8])
    run(load((0, 0), 512), tmap, x, aligned(512), block=64)
    tmap[32 + 4 * d : 36 + 4 * d] = 0xFF
    with pytest.raises(PtxError, match=f"the tensor map is invalid: size 0 in dimension {d}"):
        run(load((0, 0), 512), tmap, x, aligned(512), block=64)
