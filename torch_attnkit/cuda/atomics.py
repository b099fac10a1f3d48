"""Atomics, relaxed stores and a cache policy for CTAs of one launch that combine results. Addresses are Int64."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def swap_if(target: Int64, expected: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Compare-and-swap, acquire-release at GPU scope: stores ``value`` if ``target`` holds ``expected``; returns the
    old value."""
    text = "atom.global.gpu.acq_rel.cas.b32 $0, [$1], $2, $3;"
    return asm(Int32, [Int64(target), Int32(expected), Int32(value)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_word(target: Int64, word: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Plain store of 4 aligned bytes."""
    asm(None, [Int64(target), Int32(word)], "st.global.b32 [$0], $1;", memory=True, loc=loc, ip=ip)


@dsl_user_op
def add_relaxed(target: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Relaxed atomic add: returns the old value, orders no other access, so nothing waits for it."""
    text = "atom.global.gpu.relaxed.add.s32 $0, [$1], $2;"
    return asm(Int32, [Int64(target), Int32(value)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_relaxed(target: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Relaxed store at GPU scope, for a word that other CTAs poll."""
    asm(None, [Int64(target), Int32(value)], "st.relaxed.gpu.global.s32 [$0], $1;", memory=True, loc=loc, ip=ip)


@dsl_user_op
def evict_first(condition: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """L2 cache policy: evict_first where ``condition`` is not 0, for data that is read a single time, else
    evict_normal, so that partial results written for other CTAs stay in the L2."""
    text = (
        "{ .reg .pred p; .reg .b64 first, other; setp.ne.s32 p, $1, 0; "
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
        "createpolicy.fractional.L2::evict_normal.b64 other, 1.0; selp.b64 $0, first, other, p; }"
    )
    return asm(Int64, [Int32(condition)], text, loc=loc, ip=ip)
