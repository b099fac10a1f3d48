"""ld, st and the hints (PTX ISA 9.7.9.8 to 9.7.9.18), state spaces, variables, and accesses that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from torch_attnkit.sim import _ptx

from .snippet import aligned, run
from .test_core_integer import edge

pytestmark = pytest.mark.simulator


def at(array: int, bytes_: int, register: str = "%d0") -> str:
    return f"mad.wide.u32 {register}, %tid, {bytes_}, %in{array};"


@pytest.mark.parametrize("space", ["global", "shared", "shared::cta", "shared::cluster", "local", ""])
@pytest.mark.parametrize(
    "t", ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"]
)
def test_every_type_in_every_space(t: str, space: str) -> None:
    """Stored, loaded, and seen in a 64-bit register: narrower values are extended by their own sign."""
    size = int(t[1:]) // 8
    x = edge(f"{'s' if t[0] == 's' else 'u'}{size * 8}")[:32].copy()
    out = np.zeros(32, np.int64)
    bank = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}[size]
    where = {"global": "%d0", "": "%d0", "local": f"here+{size}"}.get(space, "%r30")
    body = f"""
    .local .align 8 .b8 here[16];
    {at(0, size)} ld.global.{t} {bank}1, [%d0];
    mov.u32 %r30, smem; mad.lo.u32 %r30, %tid, 8, %r30;
    st{"." + space if space else ""}.{t} [{where}], {bank}1;
    ld{"." + space if space else ""}.{t} %d9, [{where}];
    {at(1, 8, "%d1")} st.global.b64 [%d1], %d9;"""
    run(body, x, out, shared=256)
    want = x.view(f"i{size}").astype(np.int64) if t[0] == "s" else x.view(f"u{size}").astype(np.uint64).view(np.int64)
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("vector", "t"),
    [
        ("v2", "b8"),
        ("v4", "u8"),
        ("v2", "b16"),
        ("v4", "u16"),
        ("v2", "b32"),
        ("v4", "f32"),
        ("v8", "b32"),
        ("v2", "b64"),
        ("v4", "f64"),
    ],
)
def test_vectors(vector: str, t: str) -> None:
    n, size = int(vector[1:]), int(t[1:]) // 8
    x, out = aligned((32, n), f"u{size}"), aligned((32, n), f"u{size}")
    x[:] = np.arange(32 * n).reshape(32, n)
    bank = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}[size]
    names = ", ".join(f"{bank}{8 + i}" for i in range(n))
    back = ", ".join(f"{bank}{8 + i}" for i in reversed(range(n)))
    run(
        f"{at(0, n * size)} {at(1, n * size, '%d1')}"
        f"ld.global.{vector}.{t} {{{names}}}, [%d0]; st.global.{vector}.{t} [%d1], {{{back}}};",
        x,
        out,
    )
    assert (out == x[:, ::-1]).all()


def test_sinks_in_vectors_and_128_bits() -> None:
    x, out = aligned(128, np.uint32), aligned(128, np.uint32)
    x[:] = np.arange(128)
    run(
        f"{at(0, 16)} {at(1, 16, '%d1')}"
        "ld.global.v4.b32 {_, %r1, _, %r2}, [%d0]; st.global.v2.b32 [%d1+8], {%r2, %r1};",
        x,
        out,
    )
    assert (out.reshape(32, 4) == np.stack([0 * x[::4], 0 * x[::4], x[3::4], x[1::4]], 1)).all()
    out[:] = 0
    run(f"{at(0, 16)} ld.global.b128 %q0, [%d0]; {at(1, 16, '%d1')} st.global.b128 [%d1], %q0;", x, out)
    assert (out == x).all()


HINTS = [
    "ld.global.ca.b32 %r1, [%d0]",
    "ld.global.cg.b32 %r1, [%d0]",
    "ld.global.cs.b32 %r1, [%d0]",
    "ld.global.lu.b32 %r1, [%d0]",
    "ld.global.cv.b32 %r1, [%d0]",
    "ld.global.nc.b32 %r1, [%d0]",
    "ld.global.nc.L1::no_allocate.L2::256B.b32 %r1, [%d0]",
    "ld.global.L1::evict_first.L2::128B.b32 %r1, [%d0]",
    "ld.global.L1::evict_last.L2::cache_hint.b32 %r1, [%d0], %d5",
    "ld.weak.global.b32 %r1, [%d0]",
    "ld.volatile.global.b32 %r1, [%d0]",
    "ld.relaxed.gpu.global.b32 %r1, [%d0]",
    "ld.acquire.sys.global.b32 %r1, [%d0]",
    "ld.acquire.cta.b32 %r1, [%d0]",
    "ld.relaxed.cluster.global.L1::no_allocate.b32 %r1, [%d0]",
    "ld.mmio.relaxed.sys.global.b32 %r1, [%d0]",
    "ldu.global.b32 %r1, [%d0]",
]


@pytest.mark.parametrize("load", HINTS)
def test_loads_with_hints_and_orders(load: str) -> None:
    x, out = np.arange(32, dtype=np.uint32) + 7, np.zeros(32, np.uint32)
    run(
        f"{at(0, 4)} {at(1, 4, '%d1')}"
        f"createpolicy.fractional.L2::evict_last.b64 %d5, 0.5; {load}; st.global.b32 [%d1], %r1;",
        x,
        out,
    )
    assert (out == x).all()


@pytest.mark.parametrize(
    "store", [".wb", ".cg", ".cs", ".wt", ".L1::no_allocate", ".L2::cache_hint", ".L1::evict_first"]
)
def test_stores_with_hints(store: str) -> None:
    out = np.zeros(32, np.uint32)
    policy = ", %d5" if "hint" in store else ""
    run(f"{at(0, 4)} createpolicy.fractional.L2::evict_first.b64 %d5; st.global{store}.b32 [%d0], %tid{policy};", out)
    assert (out == np.arange(32)).all()


@pytest.mark.parametrize(
    "order", ["weak", "volatile", "relaxed.cta", "relaxed.gpu", "release.cluster", "release.sys", "mmio.relaxed.sys"]
)
def test_stores_with_orders(order: str) -> None:
    out = np.zeros(32, np.uint32)
    run(f"{at(0, 4)} st.{order}.global.b32 [%d0], %tid;", out)
    assert (out == np.arange(32)).all()


def test_hints_without_effect() -> None:
    x = np.arange(64, dtype=np.uint32)
    before = x.copy()
    run(
        """
    prefetch.global.L1 [%in0]; prefetch.global.L2 [%in0+64]; prefetch.global.L2::evict_last [%in0]; prefetchu.L1 [%in0];
    prefetch.tensormap [%in0]; prefetch.L2 [%in0]; applypriority.global.L2::evict_normal [%in0], 128;
    createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d0, 1.0;
    createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %d1, [%in0], 64, 128;
    createpolicy.cvt.L2.b64 %d2, %d0;""",
        x,
    )
    assert (x == before).all()
    run("discard.global.L2 [%in0], 128;", x)


MODULE = """
.global .align 4 .u32 counter = 41;
.global .align 16 .b8 text[6] = {72, 101, 108, 108, 111, 0};
.const .align 8 .f32 table[2][2] = {{1.0, 0f40000000}, {3.5, -4.0}};
.global .align 8 .u64 pointer = generic(counter);
.global .align 8 .u64 inside[2] = {text+4, 5};
.shared .align 16 .b8 fixed[48];
"""


def test_variables_of_the_module() -> None:
    out, floats = np.zeros(8, np.uint32), np.zeros(4, np.float32)
    run(
        """
    ld.global.u32 %r0, [counter]; st.global.u32 [%in0], %r0;
    ld.global.u8 %r1, [text+1]; st.global.u32 [%in0+4], %r1;
    ld.global.u64 %d0, [pointer]; ld.u32 %r2, [%d0]; st.global.u32 [%in0+8], %r2;
    mov.u64 %d1, text; ld.global.u8 %r3, [%d1+4]; st.global.u32 [%in0+12], %r3;
    ld.const.v2.f32 {%r4, %r5}, [table]; ld.const.f32 %r6, [table+8]; ld.const.f32 %r7, [table+12];
    st.global.v4.f32 [%in1], {%r4, %r5, %r6, %r7};
    mov.u32 %r8, fixed; mov.u32 %r9, smem; sub.u32 %r10, %r9, %r8; st.global.u32 [%in0+16], %r10;
    ld.global.u64 %d2, [inside]; ld.global.u8 %r11, [%d2]; st.global.u32 [%in0+20], %r11;
    ld.global.u64 %d3, [inside+8]; cvt.u32.u64 %r12, %d3; st.global.u32 [%in0+24], %r12;
    atom.global.add.u32 %r13, [counter], 1; ld.global.u32 %r14, [counter]; st.global.u32 [%in0+28], %r14;""",
        out,
        floats,
        block=1,
        shared=64,
        module=MODULE,
    )
    assert out.tolist() == [41, 101, 41, 111, 1024, 111, 5, 42]  # dynamic shared memory starts at a multiple of 1024
    assert floats.tolist() == [1, 2, 3.5, -4]


def test_parameters_of_every_size() -> None:
    text = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u8 small, .param .align 64 .b8 block[12], .param .f32 x,
  .param .u64 .ptr .global .align 16 p)
{
  .reg .b32 %r<8>; .reg .b64 %d<4>;
  ld.param.u64 %d0, [out]; ld.param.u8 %r0, [small]; ld.param.v2.u32 {%r1, %r2}, [block];
  ld.param::entry.u32 %r3, [block+8];
  ld.param.f32 %r4, [x]; st.global.v4.u32 [%d0], {%r0, %r1, %r2, %r3}; st.global.f32 [%d0+16], %r4;
  mov.b64 %d1, block; cvta.param.u64 %d2, %d1; ld.u32 %r5, [%d2+4]; st.global.u32 [%d0+20], %r5;
  ret;
}"""
    k = _ptx.Module(text).kernel("k")
    assert [p[1:] for p in k.params] == [
        (0, 8, 8),
        (8, 1, 1),
        (64, 12, 64),
        (76, 4, 4),
        (80, 8, 8),
    ] and k.param_bytes == 88
    out = np.zeros(6, np.uint32)
    raw = bytearray(88)
    raw[0:8] = int(out.ctypes.data).to_bytes(8, "little")
    raw[8] = 200
    raw[64:76] = np.array([5, 6, 7], np.uint32).tobytes()
    raw[76:80] = np.float32(2.5).tobytes()
    k.launch(grid=(1,), block=(1,), params=bytes(raw), ranges=[(out.ctypes.data, out.ctypes.data + 24, True, "out")])
    assert out.tolist() == [200, 5, 6, 7, int(np.float32(2.5).view(np.uint32)), 6]


REFUSED = {
    "nearest memory is 'in0'": "ld.global.u32 %r0, [%in0+128];",
    "which ends inside the access": "ld.global.v2.u64 {%d0, %d1}, [%in2+16];",
    "not a multiple of 4": "ld.global.u32 %r0, [%in0+2];",
    "not a multiple of 16": "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%in0+8];",
    "read-only": "mov.u32 %r0, 1; st.global.u32 [%in1], %r0;",
    "writes 4 bytes at global address 0x0": "mov.u64 %d0, 0; st.global.u32 [%d0], %tid;",
    "shared offset 0x": "ld.shared.u32 %r0, [smem+256];",
    "shared address 0x402 is not a multiple of 4": "ld.shared.u32 %r0, [smem+2];",
    "names CTA 5 of a cluster of 1": "mov.u32 %r0, smem; or.b32 %r0, %r0, 0x5000000; ld.shared.u32 %r1, [%r0];",
    "names CTA 3 of a cluster of 1": """mov.u32 %r0, smem; mov.u32 %r1, 3;
    mapa.shared::cluster.u32 %r2, %r0, %r1; ld.shared::cluster.u32 %r0, [%r2];""",
    "local offset 16; a lane has 16": ".local .align 8 .b8 here[16]; ld.local.u32 %r0, [here+16];",
    "the kernel trapped": "trap;",
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_wild_accesses_say_what_is_near(message: str) -> None:
    x, constant = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    constant.setflags(write=False)
    with pytest.raises(_ptx.PtxError, match=r"kernel snippet, line \d+ '.*', CTA \(0, 0, 0\) warp 0 lanes 0x") as e:
        run(REFUSED[message], x, constant, aligned(5, np.uint32), shared=256)
    assert message in str(e.value)


def test_fresh_memory_is_poisoned() -> None:
    out = np.zeros(64, np.uint32)
    body = f""".local .align 8 .b8 here[8]; {at(0, 8)}
    ld.shared.u32 %r0, [smem+64]; ld.local.u32 %r1, [here]; st.global.v2.u32 [%d0], {{%r0, %r1}};"""
    run(body, out, shared=128)
    assert (out == 0xFFFFFFFF).all()  # NaN in every format that has one
    run(body, out, shared=128, poison=False)
    assert (out == 0).all()


def strided(stride: int, bytes_: int) -> dict[str, int]:
    t = {4: "b32", 8: "v2.b32", 16: "v4.b32"}[bytes_]
    values = {4: "%r1", 8: "{%r1, %r1}", 16: "{%r1, %r1, %r1, %r1}"}[bytes_]
    r = run(
        f"mov.u32 %r0, smem; mad.lo.u32 %r0, %tid, {stride}, %r0; mov.u32 %r1, 0; st.shared.{t} [%r0], {values};",
        shared=32 * stride + 16,
    )
    return {k: v for k, v in r.counters.items() if k.startswith("shared")}


@pytest.mark.parametrize(
    ("stride", "bytes_", "wavefronts"),
    [
        (4, 4, 1),
        (8, 4, 2),
        (128, 4, 32),
        (132, 4, 1),
        (0, 4, 1),
        (8, 8, 2),
        (16, 8, 4),
        (16, 16, 4),
        (32, 16, 8),
        (128, 16, 32),
        (144, 16, 4),
    ],
)
def test_bank_conflicts_are_counted(stride: int, bytes_: int, wavefronts: int) -> None:
    """32 banks of 4 bytes; 8 and 16-byte accesses go by half and quarter warps."""
    got = strided(stride, bytes_)
    assert (
        got["shared_wavefronts"] == wavefronts
        and got["shared_least_wavefronts"] == bytes_ // 4
        and got["shared_accesses"] == 1
    )
    assert got["shared_written"] == 32 * bytes_


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (0, 1), (64, 32)])
def test_sectors_are_counted(stride: int, sectors: int) -> None:
    x = aligned(32 * 64, np.uint8)
    r = run(f"mad.wide.u32 %d0, %tid, {stride}, %in0; ld.global.b32 %r0, [%d0];", x)
    assert r.counters["global_sectors"] == sectors and r.counters["global_read"] == 128
