"""Numbers of which the compiler is told nothing."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def anew(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same number, in every turn of a loop by itself: what follows from it is computed where it is used, not kept
    in registers from ahead of the loop."""
    return asm(Int32, [Int32(value)], "mov.b32 $0, $1;", memory=True, loc=loc, ip=ip)
