"""Loads, stores and mbarrier arrivals with a predicate, an order or a cache level that CuTeDSL has no wrapper for.
Device addresses are Int64, shared ones Int32."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def prefetch(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch a line of device memory into the L1."""
    asm(None, [Int64(source)], "prefetch.global.L1 [$0];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_acquire(source: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load-acquire at GPU scope: what the storing CTA released before is visible after it."""
    return asm(Int32, [Int64(source)], "ld.acquire.gpu.global.s32 $0, [$1];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def arrive_if(barrier: Int32, condition: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Predicated arrival at an mbarrier of this CTA: a branch between two ``wgmma`` may serialise them, a predicate
    does not."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    asm(None, [Int32(barrier), Int32(condition)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_4_floats_if(source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """16 aligned bytes past the L1 (another CTA of this launch wrote them); ``valid`` 0 reads nothing and gives zeros.
    Predicated instead of branched, so that many loads can be in flight."""
    zeros = "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(4))
    text = f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {zeros}@p ld.global.cg.v4.f32 {{$0, $1, $2, $3}}, [$4]; }}"
    return asm([Float32] * 4, [Int64(source), Int32(valid)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def bulk_load(shared: Int32, source: Int64, nbytes: Int32, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Bulk copy (``cp.async.bulk``) of a multiple of 16 bytes to shared memory; ``barrier``, an mbarrier, counts
    them."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    values = [Int32(shared), Int64(source), Int32(nbytes), Int32(barrier)]
    asm(None, values, text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_2_floats(target: Int64, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """8 aligned bytes to device memory."""
    values = [Int64(target), *(Float32(v) for v in values)]
    asm(None, values, "st.global.v2.f32 [$0], {$1,$2};", memory=True, loc=loc, ip=ip)
