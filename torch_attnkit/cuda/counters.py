"""Counters in the shared memory of a block; addresses are shared ones, Int32."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def count(counter: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Add 1 to a counter in this block's shared memory."""
    asm(None, [Int32(counter)], "red.shared::cta.add.u32 [$0], 1;", memory=True, loc=loc, ip=ip)
