"""Bytes and words by address, and copies with offsets that are known beforehand. Device addresses are Int64, shared
ones Int32. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def copy_8_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is 8."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def copy_16_async_at(
    shared: Int32, target_at: int, source: Int64, source_at: int, valid: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes of device memory to shared memory, each address with an offset; ``valid`` 0 writes zeros and reads
    nothing, else it is 16."""
    text = f"cp.async.cg.shared.global.L2::128B [$0+{target_at}], [$1+{source_at}], 16, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_byte(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm(Int32, [address], "ld.shared.u8 $0, [$1];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_words(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """1, 2 or 4 aligned words."""
    words = ",".join(f"${i}" for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{words}}}" if count > 1 else "ld.shared.b32 $0"
    return asm([Int32] * count, [address], f"{form}, [${count}];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_word_if(address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word; ``valid`` 0 reads nothing and gives 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }"
    return asm(Int32, [address, valid], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_word_if(target: Int64, word: Int32, count: Int32, at: int, *, loc: Any = None, ip: Any = None) -> None:
    """A word to device memory where ``at`` is below ``count``."""
    text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {at}; @p st.global.b32 [$0], $1; }}"
    asm(None, [target, word, count], text, memory=True, loc=loc, ip=ip)
