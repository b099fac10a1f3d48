"""Shifts over two registers."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def shift_in(word: Int32, bits: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word moved up by one bit, with the highest of ``bits`` below."""
    return asm(Int32, [word, bits], "shf.l.wrap.b32 $0, $2, $1, 1;", loc=loc, ip=ip)
