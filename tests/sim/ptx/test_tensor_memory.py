"""Tensor memory (PTX ISA 9.7.16.7 to 9.7.16.9): alloc, ld, st, ld.red, cp, shift, and what must not be done."""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxDeadlock, PtxError

from .snippet import run
from .tensor_pieces import SHARED, image, index, run_tensor, store_tile, tensor_kernel

pytestmark = pytest.mark.simulator

FORMS = [
    (shape, times)
    for shape, most in (("32x32b", 128), ("16x64b", 128), ("16x128b", 64), ("16x256b", 32), ("16x32bx2", 128))
    for times in (1, 2, 4, 8, 16, 32, 64, 128)
    if times <= most
]
REGISTERS = {"16x128b": 2, "16x256b": 4}

# What CuTe publishes for the same instructions, printed where the wheel is installed: no GPU is needed for it.
PRINT_LAYOUTS = """
import cutlass, cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05 as t
@cute.jit
def show():
    for shape in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"):
        for times in (1, 2, 4, 8, 16, 32):
            for packed in (0, 1):
                pack = (t.Pack.NONE, t.Pack.PACK_16b_IN_32b)[packed]
                op = getattr(t, f"Ld{shape}Op")(getattr(t.Repetition, f"x{times}"), pack)
                atom = cute.make_copy_atom(op, (cutlass.Float32, cutlass.Float16)[packed])
                print("LAYOUT", shape, times, packed, atom.layout_dst_tv)
show()
"""


@functools.cache
def published():
    """(shape, times, packed) -> (shape, stride) of CuTe's (thread, value) layout, in elements of 32 or 16 bits."""
    pytest.importorskip("cutlass")
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "layouts.py")  # the DSL reads the source of what it compiles
        script.write_text(PRINT_LAYOUTS)
        environment = {**os.environ, "CUTE_DSL_ARCH": "sm_100a"}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    table = {}
    for line in done.stdout.splitlines():
        if line.startswith("LAYOUT"):
            _, shape, times, packed, layout = line.split()
            table[shape, int(times), int(packed)] = tuple(eval(part) for part in layout.split(":"))  # noqa: S307
    return table


def cells(shape, times, packed):
    """(32, registers, 1 or 2) -> lane, column by CuTe's layout: elements row by row of the block."""
    (threads, values), (thread_strides, value_strides) = published()[shape, times, packed]
    registers = times * REGISTERS.get(shape, 1)
    per = 2 if packed else 1
    lanes = 32 if shape == "32x32b" else 16
    columns = 32 * registers * per // lanes  # elements in a lane of the block
    at = np.array(
        [
            [index(threads, thread_strides, t) + index(values, value_strides, v) for v in range(registers * per)]
            for t in range(32)
        ]
    ).reshape(32, registers, per)
    return at // columns, at % columns


def load_kernel(shape, times, packed, lane, column):
    registers = times * REGISTERS.get(shape, 1)
    split = f", {times * (2 if packed else 1)}" if shape == "16x32bx2" else ""
    vector = ", ".join(f"%w{i}" for i in range(registers))
    store = "\n".join(f"st.global.b32 [%d21 + {4 * i}], %w{i};" for i in range(registers))
    return f"""
  .reg .b32 %w<{registers}>;
  shr.u32 %r40, %tid, 5; shl.b32 %r40, %r40, 21; add.u32 %r40, %r40, %taddr; add.u32 %r40, %r40, {lane << 16 | column};
  tcgen05.ld.sync.aligned.{shape}.x{times}{".pack::16b" if packed else ""}.b32 {{{vector}}}, [%r40]{split};
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %d21, %tid, {4 * registers}, %in2;
  {store}
"""


def run_with_all_threads(body, tensor, *arrays, shared=None, **options):
    """Like run_tensor, with the body executed by all 128 threads (warp-wide operations); `arrays` are %in2, ..."""
    kernel = tensor_kernel("", tensor.shape[1]).replace("@!%p3 bra ISSUED;", "", 1)
    kernel = kernel.replace("  setp.eq.u32 %p3, %rank, 0;", body + "  setp.eq.u32 %p3, %rank, 0;", 1)
    kernel = kernel.replace("  tcgen05.commit", "  @%p3 tcgen05.commit", 1)
    out = tensor.copy()
    filled = (image() if shared is None else shared).reshape(1, SHARED)
    run(kernel, filled, out, *arrays, block=128, shared=SHARED, **options)
    return out


@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("shape, times", [f for f in FORMS if f[1] <= 32])
def test_loads_follow_the_published_layouts(shape, times, packed):
    lane, column = cells(shape, times, packed)
    width = -(-(column.max() + 1) // 32) * 32
    tensor = np.arange(128 * width, dtype=np.uint32).reshape(128, width)
    out = np.zeros((128, lane.shape[1]), np.uint32)
    start = 0 if shape == "32x32b" else 16
    run_with_all_threads(load_kernel(shape, times, packed, start, 0), tensor, out)
    for warp in range(4):
        want = tensor[32 * warp + start + lane, column]
        if packed:
            want = want[..., :1] & 0xFFFF | want[..., 1:] << 16
        assert (out[32 * warp : 32 * warp + 32] == want[..., 0]).all()


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"check": True}], ids=["eager", "seed", "checked"])
@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("shape, times", FORMS)
def test_a_store_is_the_inverse_of_the_load(shape, times, packed, options):
    """st of distinct values, then ld of the same shape gives them back; the cells written are those that ld reads."""
    registers = times * REGISTERS.get(shape, 1)
    lanes = 32 if shape == "32x32b" else 16
    columns = 32 * registers // lanes * (1 + packed)
    if columns > 256:
        return  # 128 registers of two cells: the whole of tensor memory, and this kernel loads 256 columns
    vector = ", ".join(f"%w{i}" for i in range(registers))
    split = f", {times * (1 + packed)}" if shape == "16x32bx2" else ""
    fill = "\n".join(f"mad.lo.u32 %w{i}, %tid, {registers}, {i + 1};" for i in range(registers))
    pack = (".unpack::16b", ".pack::16b") if packed else ("", "")
    back = "\n".join(f"st.global.b32 [%d21 + {4 * i}], %w{i};" for i in range(registers))
    body = f"""
  .reg .b32 %w<{registers}>;
  shr.u32 %r40, %tid, 5; shl.b32 %r40, %r40, 21; add.u32 %r40, %r40, %taddr;
  {fill}
  tcgen05.st.sync.aligned.{shape}.x{times}{pack[0]}.b32 [%r40]{split}, {{{vector}}};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.{shape}.x{times}{pack[1]}.b32 {{{vector}}}, [%r40]{split};
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %d21, %tid, {4 * registers}, %in2;
  {back}
"""
    got = np.zeros((128, registers), np.uint32)
    out = run_with_all_threads(body, np.full((128, 256), 0xFFFFFFFF, np.uint32), got, **options)
    values = np.arange(128 * registers, dtype=np.uint32).reshape(128, registers) + 1
    assert (got == values).all()
    written = out != 0xFFFFFFFF
    assert written.sum() == values.size * (1 + packed)
    assert not written[:, columns:].any()
    if packed:
        assert (out[written] < 0x10000).all()


@pytest.mark.parametrize(
    "operation, dtype",
    [
        ("min", "u32"),
        ("max", "u32"),
        ("min", "s32"),
        ("max", "s32"),
        ("min", "f32"),
        ("max.abs", "f32"),
        ("max.NaN", "f32"),
    ],
)
def test_a_load_with_a_reduction(operation, dtype):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**32, (128, 32), dtype=np.uint32)
    if dtype == "f32":
        values = rng.standard_normal((128, 32)).astype(np.float32)
        values[5, 7] = values[9, 0] = np.nan
        values = values.view(np.uint32)
    vector = ", ".join(f"%w{i}" for i in range(32))
    body = f"""
  .reg .b32 %w<33>;
  shr.u32 %r40, %tid, 5; shl.b32 %r40, %r40, 21; add.u32 %r40, %r40, %taddr;
  tcgen05.ld.red.sync.aligned.32x32b.x32.{operation}.{dtype} {{{vector}}}, %w32, [%r40];
  mad.wide.u32 %d21, %tid, 4, %in2;
  st.global.b32 [%d21], %w32;
"""
    out = np.zeros(128, np.uint32)
    run_with_all_threads(body, values, out, target="sm_103a")
    typed = values.view({"u32": np.uint32, "s32": np.int32, "f32": np.float32}[dtype])
    if "abs" in operation:
        typed = np.abs(typed)
    fold = (
        (np.min if "NaN" in operation else np.nanmin)
        if "min" in operation
        else (np.max if "NaN" in operation else np.nanmax)
    )
    np.testing.assert_array_equal(out.view(typed.dtype), fold(typed, axis=1))


def copy_body(form, at, to=0, group=1):
    return f"""
  mov.u32 %r20, smem; and.b32 %r20, %r20, 0x3ffff; shr.b32 %r20, %r20, 4; mov.b32 %r19, 0; mov.b64 %d10, {{%r20, %r19}};
  add.s64 %d11, %d10, {at.tcgen05()}; add.u32 %r21, %taddr, {to};
  tcgen05.cp.cta_group::{group}.{form} [%r21], %d11;
"""


@pytest.mark.parametrize("swizzle", ["none", "32", "128"])
@pytest.mark.parametrize(
    "form", ["128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4"]
)
def test_copies_from_shared_memory(form, swizzle):
    """Rows of the matrix go to lanes; multicast forms repeat runs of 32 lanes (CuTe: SM100_UTCCP_*)."""
    rng = np.random.default_rng(2)
    rows, bits = (int(x) for x in form.split("b")[0].split("x"))
    data = rng.integers(0, 256, (rows, bits // 8), dtype=np.uint8)
    shared = image()
    at = store_tile(shared, 0, data, swizzle, False)
    words = data.view(np.uint32)
    if "02_13" in form:
        lanes = np.tile(np.arange(64), 2)
    elif "01_23" in form:
        lanes = np.concatenate([np.tile(np.arange(32), 2), np.tile(np.arange(32, 64), 2)])
    else:
        lanes = np.arange(128) % rows
    for options in ({}, {"seed": 2}, {"check": True}):
        out = run_tensor(copy_body(form, at, 8), shared, np.zeros((128, 32), np.uint32), **options)
        assert (out[:, 8 : 8 + bits // 32] == words[lanes]).all()
        assert not out[:, :8].any()
        assert not out[:, 8 + bits // 32 :].any()


def test_four_rows_go_to_one_lane_of_each_warp():
    """4x256b: rows 0, 32, 64, 96 of the matrix (CuTe: SM100_UTCCP_4dp256bit), to the address's lane in every warp."""
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, (128, 32), dtype=np.uint8)
    shared = image()
    at = store_tile(shared, 0, data, "32", False)
    out = run_tensor(copy_body("4x256b", at, 31 << 16), shared, np.zeros((128, 32), np.uint32), check=True)
    assert (out[31::32, :8] == data[::32].view(np.uint32)).all()
    assert not np.delete(out, np.arange(31, 128, 32), 0).any()


@pytest.mark.parametrize("bits", [4, 6])
def test_copies_unpack_narrow_elements(bits):
    """16 packed elements and padding become 16 bytes: 4-bit elements in bits 2 to 5, 6-bit ones in bits 0 to 5."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1 << bits, (128, 32)).astype(np.uint64)
    raw = np.zeros((128, 2, 16), np.uint8)
    for i in range(32):
        for bit in range(bits):
            at = i % 16 * bits + bit
            raw[:, i // 16, at // 8] |= ((codes[:, i] >> np.uint64(bit) & np.uint64(1)) << np.uint64(at % 8)).astype(
                np.uint8
            )
    shared = image()
    stored = store_tile(shared, 0, raw.reshape(128, 32), "32", False)
    form = f"128x256b.b8x16.b{bits}x16_p{128 - 16 * bits}"
    out = run_tensor(copy_body(form, stored), shared, np.zeros((128, 32), np.uint32))
    want = (codes << np.uint64(2 if bits == 4 else 0)).astype(np.uint8)
    assert (np.ascontiguousarray(out[:, :8]).view(np.uint8) == want).all()


def test_a_pair_copies_each_from_its_own_shared_memory():
    data = np.random.default_rng(6).integers(0, 256, (2, 32, 16), dtype=np.uint8)
    shared = np.stack([image(), image()])
    for i in range(2):
        at = store_tile(shared[i], 1024, data[i], "none", False)
    out = run_tensor(copy_body("32x128b.warpx4", at, group=2), shared, np.zeros((2, 128, 32), np.uint32), 2, check=True)
    for i in range(2):
        assert (out[i, :, :4] == np.tile(data[i].view(np.uint32), (4, 1))).all()


def test_shift_moves_31_lanes_of_a_warp():
    tensor = np.arange(128 * 32, dtype=np.uint32).reshape(128, 32)
    want = tensor.copy()
    want[64:95, 8:16] = tensor[65:96, 8:16]
    out = run_tensor(f"add.u32 %r21, %taddr, {64 << 16 | 8}; tcgen05.shift.cta_group::1.down [%r21];", image(), tensor)
    assert (out == want).all()
    with pytest.raises(PtxError, match="multiple of 32"):
        run_tensor(f"add.u32 %r21, %taddr, {8 << 16}; tcgen05.shift.cta_group::1.down [%r21];", image(), tensor)


ALLOC = """
  .shared .align 4 .b32 slot[4];
  .reg .b32 %a<4>;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {n};
  ld.shared.b32 %a0, [slot];
"""


def alone(body, **options):
    return run(body, np.zeros(1, np.uint32), block=options.pop("block", 32), **options)


def test_allocations_are_disjoint_and_columns_come_back():
    body = (
        ALLOC.format(n=256)
        + """
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot + 4], 128;
  ld.shared.b32 %a1, [slot + 4];
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a0, 256;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot + 8], 64;
  ld.shared.b32 %a2, [slot + 8];
  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
  st.global.v2.b32 [%in0], {%a1, %a2};
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a1, 128;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a2, 64;
"""
    )
    out = np.full(2, 7, np.uint32)
    run(body, out, block=32)
    assert out.tolist() == [256, 0]


FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a0, 64;"
MISUSE = {
    "48 columns": (ALLOC.format(n=48), "nCols is 48"),
    "16 columns": (ALLOC.format(n=16), "nCols is 16"),
    "leak": (ALLOC.format(n=64), "not deallocated|leak"),
    "twice": (ALLOC.format(n=64) + FREE + FREE, "no allocation starts there"),
    "other size": (ALLOC.format(n=64) + FREE.replace("64", "32"), "the allocation there has 64 columns"),
    "after relinquish": (
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + ALLOC.format(n=64),
        "after tcgen05.relinquish_alloc_permit",
    ),
    "freed twice": (
        ALLOC.format(n=64) + FREE + FREE,
        r"warp 0 has given columns 0 \.\. 63 back, line \d+ 'tcgen05.dealloc",
    ),
    "freed": (
        ALLOC.format(n=64) + FREE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%a0 + 32];",
        r"column 32 is not allocated: warp 0 has given columns 0 \.\. 63 back, line \d+ 'tcgen05.dealloc",
    ),
    "unallocated": (
        ALLOC.format(n=64) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%a0 + 64];" + FREE,
        "column 64 is not allocated",
    ),
    "before alloc": (
        "mov.b32 %r0, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r0];",
        "column 0 is not allocated",
    ),
    "beyond": (
        ALLOC.format(n=512) + "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%a0 + 511];",
        "leave tensor memory",
    ),
    "foreign lanes": (
        ALLOC.format(n=64) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%a0 + 2097152];",
        "lane 32 is not among those of this warp",
    ),
    "odd lane": (
        ALLOC.format(n=64) + "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%a0 + 524288];",
        "has to be a multiple of 16",
    ),
    "lanes disagree": (
        ALLOC.format(n=64) + "add.u32 %a0, %a0, %tid; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%a0];",
        "the warp has to agree",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_an_error(name):
    body, message = MISUSE[name]
    with pytest.raises(PtxError, match=message):
        alone(body)


def test_an_allocation_that_does_not_fit_blocks():
    with pytest.raises(PtxDeadlock, match="tcgen05.alloc of 64 columns"):
        alone(
            ALLOC.format(n=512)
            + ALLOC.format(n=64).replace(".shared .align 4 .b32 slot[4];", "").replace(".reg .b32 %a<4>;", "")
        )


def test_a_pair_allocates_and_frees_together():
    body = """
  .shared .align 4 .b32 slot;
  .reg .b32 %a<4>;
  mov.u32 %a1, %cluster_ctarank;
  setp.eq.u32 %p0, %a1, {who};
  @%p0 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 64;
  @%p0 ld.shared.b32 %a0, [slot];
  @%p0 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %a0, 64;
"""
    with pytest.raises(PtxDeadlock, match="waiting for the other CTA of the pair"):
        alone(body.format(who=0), grid=2, cluster=2)
    alone(body.replace("setp.eq", "setp.ge").format(who=0), grid=2, cluster=2)
    with pytest.raises(PtxError, match="needs a pair"):
        alone(body.format(who=0))


SYNTAX = {
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r0];": "1 registers",
    "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r0];": "too many",
    "tcgen05.ld.sync.aligned.32x32b.x1.pack::8b.b32 {%r1}, [%r0];": "pack::8b",
    "tcgen05.ld.aligned.32x32b.x1.b32 {%r1}, [%r0];": "sync",
    "tcgen05.cp.cta_group::1.64x128b [%r0], %d0;": "warpx2",
    "tcgen05.cp.128x256b [%r0], %d0;": "cta_group",
    "tcgen05.mma.cta_group::1.kind::f8 [%r0], %d0, %d0, %r0, %p0;": "unknown .kind::f8",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %d0, %d0, %r0, %p0;": "not supported",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r0], %d0, %d0, %r0, [%r0], [%r0], %p0;": "scale vector size",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16 [%r0], %d0, %d0, %r0, [%r0], [%r0], %p0;": "does not go",
    "tcgen05.mma.cta_group::1.kind::f16.collector::b0::fill [%r0], %d0, %d0, %r0, %p0;": "unknown .collector",
    "tcgen05.mma.cta_group::1.kind::i8 [%r0], %d0, %d0, %r0, %p0, 1;": "operands",
    "tcgen05.frobnicate.sync.aligned;": "one of",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r1, %r2}, %r3, [%r0];": "not supported on .target 'sm_100a'",
}


@pytest.mark.parametrize("text", SYNTAX)
def test_unknown_forms_are_refused(text):
    with pytest.raises(PtxError, match=SYNTAX[text]):
        alone(text)


@pytest.mark.parametrize(
    "feature, operands, instead",
    [
        ("kind::i8", "%p0", "kind::f16"),
        ("kind::mxf8f6f4.block_scale.scale_vec::1X", "[%r0], [%r0], %p0", "block32"),
        ("kind::mxf4.block_scale.scale_vec::2X", "[%r0], [%r0], %p0", "block32"),
        ("kind::mxf4nvf4.block_scale.scale_vec::4X", "[%r0], [%r0], %p0", "block16"),
    ],
)
def test_what_one_gpu_has_and_its_family_has_not(feature, operands, instead):
    """As ptxas refuses it: Feature '.scale_vec::4X' not supported on .target 'sm_100f'."""
    text = f"bra END; tcgen05.mma.cta_group::1.{feature} [%r0], %d0, %d0, %r0, {operands}; END:"
    alone(text)
    name = feature.split(".")[-1]
    with pytest.raises(PtxError, match=f"'.{name}' is not supported on .target 'sm_100f'"):
        alone(text, target="sm_100f")
    alone(text.replace(name, instead), target="sm_100f")


def test_lanes_of_another_warp_are_a_finding_of_checked_runs():
    """PTX ISA 9.7.16.8.1. Waived, the quarter is the warp's own: both warps name lane 32, and each writes its own."""
    body = """
  .reg .b32 %a<4>;
  .shared .align 4 .b32 slot;
  setp.lt.u32 %p2, %tid, 32;
  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
  bar.sync 0;
  ld.shared.b32 %a0, [slot];
  add.u32 %a1, %a0, 2097152;
  @!%p2 tcgen05.st.sync.aligned.32x32b.x1.b32 [%a1], {%tid};
  tcgen05.wait::st.sync.aligned;
  shr.u32 %a2, %tid, 5; shl.b32 %a2, %a2, 21; add.u32 %a2, %a2, %a0;
  @!%p2 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%a2];
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %d1, %tid, 4, %in0;
  @!%p2 st.global.b32 [%d1], %r1;
  bar.sync 0;
  @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a0, 32;
"""
    out = np.zeros(128, np.uint32)
    with pytest.raises(PtxError, match="lane 32 is not among those of this warp"):
        run(body, out, block=128)
    found = run(body, out, block=128, check=True).reports
    assert len(found) == 1 and found[0].startswith("tcgen05.ld or .st in lanes of another warp (PTX ISA 9.7.16.8.1")
    assert "lane 32, column 0" in found[0]
    found = run(body, out, block=128, check=True, waive=["foreign_lanes"]).reports
    assert found[0] == "note: waived: foreign_lanes (seen 2 times)"
    assert (out[32:] == np.arange(32, 128)).all()
