"""Counters in the shared memory of a block or a cluster; addresses are shared ones, Int32. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def count(counter: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Add 1 to a counter in this block's shared memory."""
    asm(None, [Int32(counter)], "red.shared::cta.add.u32 [$0], 1;", memory=True, loc=loc, ip=ip)


@dsl_user_op
def count_if(counter: Int32, condition: Any, *, loc: Any = None, ip: Any = None) -> None:
    """The same where ``condition`` holds."""
    one = cutlass.select_(condition, Int32(1), Int32(0))
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p red.shared::cta.add.u32 [$0], 1; }"
    asm(None, [Int32(counter), one], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_2_of_cluster(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Two words, at a multiple of 8 bytes, from a ``warp_ops.cluster_address``."""
    return asm([Int32] * 2, [address], "ld.shared::cluster.v2.b32 {$0, $1}, [$2];", memory=True, loc=loc, ip=ip)
