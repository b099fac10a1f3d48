"""Compiler barrier for values in registers."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def compiler_barrier(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Compiler barrier: ``value`` through an opaque ``mov``, so that expressions derived from it are rematerialised in
    the loop instead of hoisted into registers ahead of it."""
    return asm(Int32, [Int32(value)], "mov.b32 $0, $1;", memory=True, loc=loc, ip=ip)
