"""Accesses to device memory by which blocks of one launch join what they have. Addresses are Int64. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def swap_if(target: Int64, expected: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """What stood at ``target``, where ``value`` stands then if it was ``expected``; orders device memory among the
    blocks that meet there."""
    text = "atom.global.gpu.acq_rel.cas.b32 $0, [$1], $2, $3;"
    return asm(Int32, [Int64(target), Int32(expected), Int32(value)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_word(target: Int64, word: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """4 aligned bytes."""
    asm(None, [Int64(target), Int32(word)], "st.global.b32 [$0], $1;", memory=True, loc=loc, ip=ip)


@dsl_user_op
def read_once(*, loc: Any = None, ip: Any = None) -> Int64:
    """The cache policy of what nobody reads again: it leaves the second-level cache first, and what was written there
    to be read soon stays."""
    return asm(Int64, [], "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", loc=loc, ip=ip)
