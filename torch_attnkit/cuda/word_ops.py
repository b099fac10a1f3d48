"""Bytes and words by address, and ``cp.async`` with immediate offsets. Device addresses are Int64, shared ones
Int32."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm


@dsl_user_op
def copy_async(nbytes: int, shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """4, 8 or 16 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is
    ``nbytes``."""
    kind = "cg" if nbytes == 16 else "ca"
    text = f"cp.async.{kind}.shared.global [$0], [$1], {nbytes}, $2;"
    asm(None, [Int32(shared), Int64(source), Int32(valid)], text, memory=True, loc=loc, ip=ip)


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
    """A byte of shared memory."""
    return asm(Int32, [Int32(address)], "ld.shared.u8 $0, [$1];", memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_words(count: int, address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """2 or 4 aligned words of shared memory, or one."""
    vector = f".v{count}" if count > 1 else ""
    names = [f"${i}" for i in range(count)]
    into = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    text = f"ld.shared{vector}.b32 {into}, [${count}];"
    return asm([Int32] * count, [Int32(address)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def load_words_if(count: int, address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Words of shared memory; ``valid`` 0 reads nothing and gives zeros, without a branch."""
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
    loads = "".join(f"@p ld.shared.b32 ${i}, [${count} + {4 * i}]; " for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros}{loads}}}"
    return asm([Int32] * count, [Int32(address), Int32(valid)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def store_word_if(target: Int64, word: Int32, count: Int32, at: int, *, loc: Any = None, ip: Any = None) -> None:
    """A word to device memory where ``at`` is below ``count``."""
    text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {at}; @p st.global.b32 [$0], $1; }}"
    asm(None, [target, word, count], text, memory=True, loc=loc, ip=ip)
