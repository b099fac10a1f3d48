"""Warp-level instructions that CuTeDSL's own wrappers do not expose one by one.

Registers of 16-bit pairs are Int32, shared addresses Int32, device addresses Int64. Lane l of a warp has row
``l // 4`` and columns ``2 * (l % 4)``, ``+ 1`` of every 8 x 8 tile that it holds in registers (PTX ISA, "Matrix
fragments for mma.m16n8k16").
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm, half

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
)


def exp2(x: Float32) -> Float32:
    """2^x, within 2 ulp (PTX ISA, ``ex2.approx.ftz.f32``)."""
    return cute.math.exp2(x, fastmath=True)


def tanh(x: Float32) -> Float32:
    """To about 2e-7 of its value; the hardware's approximation is 1000 times coarser than an LSE needs.

    1 - 2 / (1 + e^2x) alone errs by as much of 1, which a soft cap of 50 makes 1e-5 of every small score. Below 0.63
    stands a polynomial in x^2, the best of its degree, within 5e-9.
    """
    square = x * x
    small = x + x * square * (
        -0.33333275 + square * (0.13331275 + square * (-0.05372513 + square * (0.02058983 - square * 0.00564832)))
    )
    large = 1.0 - 2.0 * cute.arch.rcp_approx(exp2(x * (2.0 * LOG2_E)) + 1.0)
    return cutlass.select_(square < 0.4, small, large)


def soft_cap(score: Float32, slope: Float32) -> Float32:
    """tanh(slope * score): a capped score, in units of the cap."""
    return tanh(score * slope)


@dsl_user_op
def fresh(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Compiler barrier: the same value through an opaque ``mov``, so that what derives from it is computed here."""
    return asm(Int32, [value], "mov.b32 $0, $1;", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def ldmatrix_x4(address: Int32, *, transposed: bool = False, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Four 8 x 8 tiles; lane l gives the address of row ``l % 8`` (16 bytes) of tile ``l // 8``."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    return asm([Int32] * 4, [address], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def mma_m16n8k16(
    dtype: Any, a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None
) -> tuple[Float32, Float32, Float32, Float32]:
    """``a (16, 16) @ b (16, 8) + c (16, 8)``: a has four registers, b two, c four floats."""
    return asm([Float32] * 4, [*a, *b, *c], _MMA.format(t=half(dtype)), loc=loc, ip=ip)


@dsl_user_op
def transpose_8x8(pairs: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """An 8 x 8 tile of 16-bit values, transposed across the warp."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return asm(Int32, [pairs], text, volatile=True, loc=loc, ip=ip)


@dsl_user_op
def pack(dtype: Any, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two floats, rounded to nearest, as a pair of ``dtype``."""
    text = f"cvt.rn.{half(dtype)}x2.f32 $0, $2, $1;"
    return asm(Int32, [low, high], text, loc=loc, ip=ip)


@dsl_user_op
def copy_16_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is 16."""
    text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def copy_4_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """The same with 4 bytes, for rows that start at any multiple of 4; ``valid`` is 0 or 4."""
    text = "cp.async.ca.shared.global [$0], [$1], 4, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_pair(source: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """4 bytes of device memory that nothing writes while the kernel runs."""
    return asm(Int32, [source], "ld.global.nc.b32 $0, [$1];", loc=loc, ip=ip)


@dsl_user_op
def load_4_floats(source: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """16 aligned bytes past the first-level cache: what other blocks of this launch wrote."""
    return asm([Float32] * 4, [source], "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_2_floats(source: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """8 aligned bytes past the first-level cache."""
    return asm([Float32] * 2, [source], "ld.global.cg.v2.f32 {$0,$1}, [$2];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def cluster_address(address: Int32, cta: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``mapa``: the cluster address of ``address``, a shared address, in CTA ``cta``."""
    return asm(Int32, [address, cta], "mapa.shared::cluster.u32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def load_cluster_floats(
    count: int, address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None
) -> tuple[Float32, ...]:
    """2 or 4 aligned floats from a ``cluster_address``; ``valid`` 0 reads nothing and gives zeros."""
    outs = ",".join(f"${i}" for i in range(count))
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros}"
        f"@p ld.shared::cluster.v{count}.f32 {{{outs}}}, [${count}]; }}"
    )
    return asm([Float32] * count, [address, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_4_floats(target: Int64, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """16 aligned bytes to device memory."""
    text = "st.global.v4.f32 [$0], {$1,$2,$3,$4};"
    asm(None, [target, *values], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_float(target: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    asm(None, [target, value], "st.global.f32 [$0], $1;", memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_2_pairs(target: Int64, low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 aligned bytes to device memory."""
    asm(None, [target, low, high], "st.global.v2.b32 [$0], {$1,$2};", memory=True, loc=loc, ip=ip)


@dsl_user_op
def add_acq_rel(target: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Atomic add, acquire-release at GPU scope: returns the value before."""
    text = "atom.global.gpu.acq_rel.add.s32 $0, [$1], $2;"
    return asm(Int32, [target, value], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def forget_barrier(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """``mbarrier.inval``: the mbarrier's memory may be reused."""
    asm(None, [address], "mbarrier.inval.shared.b64 [$0];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def log2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return asm(Float32, [x], "lg2.approx.f32 $0, $1;", loc=loc, ip=ip)


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The thread's index, read again: a compiler barrier, so that what derives from it does not occupy registers."""
    return asm(Int32, [], "mov.u32 $0, %tid.x;", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def any_of_threads(value: Int32, barrier: int, threads: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """``barrier.red.or``: whether ``value`` is not 0 in any of the ``threads`` threads of a named barrier."""
    text = (
        "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
        f"barrier.cta.red.or.aligned.pred q, {barrier}, {threads}, p; selp.s32 $0, 1, 0, q; }}"
    )
    return asm(Int32, [value], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a * b + c, rounded once."""
    return asm(Float32, [Float32(x) for x in (a, b, c)], "fma.rn.f32 $0, $1, $2, $3;", loc=loc, ip=ip)


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The largest of three numbers, on Blackwell."""
    return asm(Float32, [Float32(x) for x in (a, b, c)], "max.f32 $0, $1, $2, $3;", loc=loc, ip=ip)


@dsl_user_op
def max_or_nan(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of two numbers, or NaN if one is."""
    return asm(Float32, [Float32(x) for x in (a, b)], "max.NaN.f32 $0, $1, $2;", loc=loc, ip=ip)


@dsl_user_op
def pack_e4m3(values: list[Float32], *, loc: Any = None, ip: Any = None) -> Int32:
    """Four floats, rounded to nearest, as E4M3; what is beyond 448 becomes 448."""
    text = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }"
    )
    return asm(Int32, [Float32(x) for x in values], text, loc=loc, ip=ip)
