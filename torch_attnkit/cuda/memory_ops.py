"""Accesses to memory that say more than a load or a store does. Device addresses are Int64, shared ones Int32. Imports
cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def prefetch(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Bring a line of device memory to the first-level cache."""
    asm([], [Int64(source)], "prefetch.global.L1 [$0];", effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_acquire(source: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """A number that another block sets; what that block released before is there then."""
    (value,) = asm([Int32], [Int64(source)], "ld.acquire.gpu.global.s32 $0, [$1];", effects=True, loc=loc, ip=ip)
    return value


@dsl_user_op
def arrive_if(barrier: Int32, condition: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at an mbarrier of this block where ``condition`` is not 0, without a branch: between products of ``wgmma``
    a branch may make them wait for each other."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    asm([], [Int32(barrier), Int32(condition)], text, effects=True, loc=loc, ip=ip)
