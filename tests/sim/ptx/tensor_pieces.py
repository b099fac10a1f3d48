"""What the tests of the tensor core units share: number formats, layouts in shared memory, kernels around
one instruction.

Layouts are written as the PTX ISA and CuTe write them, ``shape:stride`` evaluated element by element, so that nothing
here follows the simulator's own address arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .snippet import run

SHARED = 64 * 1024  # bytes of dynamic shared memory in these kernels


# --- number formats (PTX ISA 5.2.3): value of every code


def small_floats(exponent: int, mantissa: int, *, ieee: bool = False, nan: bool = False) -> np.ndarray:
    """The values of all codes of a sign-exponent-mantissa format."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    e, m = codes >> mantissa & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    value = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m * 2.0**-mantissa) * 2.0 ** (e - bias))
    if ieee:
        value = np.where(e == (1 << exponent) - 1, np.where(m == 0, np.inf, np.nan), value)
    if nan:
        value = np.where(codes % (1 << (exponent + mantissa)) == (1 << (exponent + mantissa)) - 1, np.nan, value)
    return np.where(codes >> (exponent + mantissa), -value, value)


TABLES = {
    "e4m3": small_floats(4, 3, nan=True),
    "e5m2": small_floats(5, 2, ieee=True),
    "e3m2": small_floats(3, 2),
    "e2m3": small_floats(2, 3),
    "e2m1": small_floats(2, 1),
    "s8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64),
    "u8": np.arange(256).astype(np.float64),
    "s4": np.where(np.arange(16) < 8, np.arange(16), np.arange(16) - 16).astype(np.float64),
    "u4": np.arange(16).astype(np.float64),
}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4}


def bf16_codes(values: np.ndarray) -> np.ndarray:
    """Codes of values that bf16 holds exactly."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def operand(dtype: str, rows: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A random operand: codes (rows, k), an unsigned integer each, and the values they stand for (float64)."""
    if dtype in BYTES:
        values = rng.integers(-8, 9, (rows, k)).astype(np.float32)
        if dtype == "f16":
            return values.astype(np.float16).view(np.uint16), values.astype(np.float64)
        if dtype == "bf16":
            return bf16_codes(values), values.astype(np.float64)
        noise = rng.integers(0, 1 << 13, values.shape).astype(np.uint32)  # the low 13 bits are ignored
        return values.view(np.uint32) | noise, values.astype(np.float64)
    table = TABLES[dtype]
    fine = np.flatnonzero(np.isfinite(table) & (np.abs(table) <= 448))
    codes = rng.choice(fine, (rows, k)).astype(np.uint8)
    return codes, table[codes]


def in_order(a: np.ndarray, b: np.ndarray, before: np.ndarray | float = 0.0) -> np.ndarray:
    """a (m, k) times b (n, k) transposed, to the bit: csrc/sim/ptx/tensor/matmul.h says in which order float32 adds up.

    Products of all formats are exact in float32, also with block scales. Integers are exact anyway.
    """
    total = np.zeros((len(a), len(b)), np.float32)
    for x, y in zip(a.T, b.T, strict=True):
        total += np.outer(x, y).astype(np.float32)
    return (np.asarray(before, np.float32) + total).astype(np.float32)


# --- layouts


def index(shape: Any, stride: Any, coordinate: int) -> int:
    """A CuTe layout at an integer coordinate: modes count from the left."""
    if isinstance(shape, int):
        return coordinate * stride
    total = 0
    for s, d in zip(shape, stride, strict=True):
        n = int(np.prod(list(flatten(s))))
        total += index(s, d, coordinate % n if (s, d) is not (shape[-1], stride[-1]) else coordinate)
        coordinate //= n
    return total


def flatten(x: Any) -> Any:
    if isinstance(x, int):
        yield x
    else:
        for y in x:
            yield from flatten(y)


# mode: (code in wgmma's and in tcgen05's descriptor, 16-byte chunks in a row of the atom, Swizzle<bits, base, shift>)
SWIZZLES = {
    "none": (0, 0, 1, (0, 4, 3)),
    "32": (3, 6, 2, (1, 4, 3)),
    "64": (2, 4, 4, (2, 4, 3)),
    "128": (1, 2, 8, (3, 4, 3)),
    "128/32": (None, 1, 8, (2, 5, 2)),
}


@dataclass(frozen=True)
class StoredTile:
    """A matrix in a shared memory image."""

    start: int
    leading: int
    stride: int
    swizzle: str

    def wgmma(self) -> int:
        return self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | SWIZZLES[self.swizzle][0] << 62

    def tcgen05(self) -> int:
        return (
            self.start >> 4
            | self.leading >> 4 << 16
            | self.stride >> 4 << 32
            | 1 << 46
            | SWIZZLES[self.swizzle][1] << 61
        )


def store_tile(image: np.ndarray, start: int, codes: np.ndarray, swizzle: str, mn_major: bool) -> StoredTile:
    """Writes codes (mn, k) into a shared memory image at byte `start`, in the canonical layout of PTX ISA 9.7.16.3.3.

    ``image`` stands for shared memory from a multiple of 1024 on, `start` counts from there. Elements have whole bytes.
    """
    rows, k = codes.shape
    size = codes.dtype.itemsize
    t = 16 // size  # elements of a 128-bit chunk
    _, _, w, (bits, base, shift) = SWIZZLES[swizzle]
    atom = 4 if swizzle == "128/32" else 8
    if not mn_major and swizzle == "none":  # ((8,m),(T,2k)):((1T,SBO),(1,LBO)), chunks one after the other along m
        sbo, lbo = 8 * t, rows * t
        shape, stride = ((8, rows // 8), (t, k // t)), ((t, sbo), (1, lbo))
    elif not mn_major:  # ((8,m),(T,2k)):((wT,SBO),(1,T))
        sbo, lbo = 8 * w * t, t
        shape, stride = ((8, rows // 8), (t, k // t)), ((w * t, sbo), (1, t))
    elif swizzle == "none":  # ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
        sbo, lbo = 8 * t, 8 * t * (rows // t)
        shape, stride = ((t, 1, rows // t), (atom, -(-k // atom))), ((1, t, sbo), (t, lbo))
    else:  # ((T,w,m),(8,k)):((1,T,LBO),(wT,SBO))
        sbo = atom * w * t
        lbo = sbo * -(-k // atom)
        shape, stride = ((t, w, -(-rows // (t * w))), (atom, -(-k // atom))), ((1, t, lbo), (w * t, sbo))
    at_mn = np.array([index(shape[0], stride[0], i) for i in range(rows)])
    at_k = np.array([index(shape[1], stride[1], i) for i in range(k)])
    address = start + (at_mn[:, None] + at_k[None, :]) * size
    address ^= (address >> (base + shift) & ((1 << bits) - 1)) << base
    for byte in range(size):
        image[address + byte] = codes.astype(np.uint64) >> np.uint64(8 * byte) & np.uint64(255)
    return StoredTile(start, lbo * size, sbo * size, swizzle)


# --- kernels

FILL_SHARED = """
  mov.u32 %r0, smem;
  mov.u32 %r1, %tid;
FILL: setp.ge.u32 %p0, %r1, {words};
  @%p0 bra FILLED;
  mul.wide.u32 %d0, %r1, 4;
  add.s64 %d1, %in0, %d0;
  ld.global.b32 %r2, [%d1];
  shl.b32 %r3, %r1, 2;
  add.u32 %r3, %r3, %r0;
  st.shared.b32 [%r3], %r2;
  add.u32 %r1, %r1, 128;
  bra FILL;
FILLED: fence.proxy.async;
  bar.sync 0;
"""

TENSOR_KERNEL = """
  .reg .b32 %v<128>;
  .reg .b32 %rank, %taddr, %row, %barrier;
  .shared .align 8 .b64 done;
  .shared .align 4 .b32 slot;
  mov.u32 %rank, %cluster_ctarank;
  mad.wide.u32 %in0, %rank, {shared}, %in0;
  mad.wide.u32 %in1, %rank, {tensor}, %in1;
  mad.wide.u32 %d20, %tid, {line}, %in1;
  mov.u32 %barrier, done;
  setp.eq.u32 %p1, %tid, 0;
  setp.lt.u32 %p2, %tid, 32;
  @%p1 mbarrier.init.shared.b64 [%barrier], 1;
  @%p1 fence.mbarrier_init.release.cluster;
  @!%p2 bra ALLOCATED;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], 512;
ALLOCATED: bar.sync 0;
  ld.shared.b32 %taddr, [slot];
{fill}
{preload}
  tcgen05.wait::st.sync.aligned;
  tcgen05.fence::before_thread_sync;
  {barrier}
  tcgen05.fence::after_thread_sync;
  setp.eq.u32 %p3, %rank, 0;
  and.pred %p3, %p3, %p1;
  @!%p3 bra ISSUED;
{body}
  {commit}
ISSUED: mbarrier.try_wait.parity.shared.b64 %p4, [%barrier], 0;
  @!%p4 bra ISSUED;
  tcgen05.fence::after_thread_sync;
{dump}
  tcgen05.wait::ld.sync.aligned;
  tcgen05.fence::before_thread_sync;
  {barrier}
  tcgen05.fence::after_thread_sync;
  @!%p2 bra FREED;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %taddr, 512;
FREED:
"""


def tensor_kernel(body: str, columns: int, group: int = 1) -> str:
    """A kernel of 128 threads (in a pair of CTAs: each) around tcgen05 operations of one thread.

    in0: shared memory images (CTAs, SHARED) bytes. in1: tensor memory (CTAs, 128, columns) words, loaded before and
    dumped after. The body finds: %taddr, %r10.. free. Everything it issues is committed to one mbarrier.
    """
    vector = ", ".join(f"%v{i}" for i in range(32))
    preload, dump = [], []
    for c in range(0, columns, 32):
        preload += [f"  ld.global.b32 %v{i}, [%d20 + {4 * (c + i)}];" for i in range(32)]
        preload += [f"  add.u32 %row, %taddr, {c};", f"  tcgen05.st.sync.aligned.32x32b.x32.b32 [%row], {{{vector}}};"]
        dump += [f"  add.u32 %row, %taddr, {c};", f"  tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{vector}}}, [%row];"]
        dump += [f"  st.global.b32 [%d20 + {4 * (c + i)}], %v{i};" for i in range(32)]
    cluster = "barrier.cluster.arrive; barrier.cluster.wait;"
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%barrier];"
    if group == 2:
        commit = commit.replace("cta_group::1", "cta_group::2").replace(
            ".b64 [%barrier]", ".multicast::cluster.b64 [%barrier], %h0"
        )
        commit = f"mov.u16 %h0, 3; {commit}"
    return TENSOR_KERNEL.format(
        shared=SHARED,
        tensor=128 * columns * 4,
        line=columns * 4,
        group=group,
        fill=FILL_SHARED.format(words=SHARED // 4),
        preload="\n".join(preload),
        dump="\n".join(dump),
        body=body,
        commit=commit,
        barrier=cluster if group == 2 else "bar.sync 0;",
    )


def run_tensor(body: str, shared: np.ndarray, tensor: np.ndarray, group: int = 1, **options: Any) -> np.ndarray:
    """Tensor memory after the body: (128, columns) uint32, or (2, 128, columns) with a pair. See `tensor_kernel`."""
    out = np.ascontiguousarray(tensor, np.uint32).copy()
    ctas = 2 if group == 2 else 1
    image = np.zeros((ctas, SHARED), np.uint8)
    image[:] = shared
    result = run(
        tensor_kernel(body, tensor.shape[-1], group),
        image,
        out,
        grid=ctas,
        cluster=ctas,
        block=128,
        shared=SHARED,
        **options,
    )
    assert not result.reports, result.reports
    return out


def image() -> np.ndarray:
    """An empty shared memory image: what lies in the dynamic shared memory, from its start on."""
    return np.zeros(SHARED, np.uint8)
