"""``tcgen05.mma`` of one CTA, issued by one thread: matrix descriptors of shared memory, and products without scales.

Operands lie along K, in rows of 128 or 64 bytes that are swizzled as TMA does it, so a step of a product, 32 bytes of
each row whatever the dtype, begins two units of a descriptor behind the step before. Source: PTX ISA, "Matrix
descriptor", "Instruction descriptor".
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm

ROWS = 128  # of the first operand: the lanes of tensor memory
STEP_BYTES = 32  # of a row, in one product
NEXT_STEP = STEP_BYTES >> 4  # in a descriptor
_VERSION = 1 << 46  # of matrix descriptors on Blackwell
_SWIZZLES = {128: 2 << 61, 64: 4 << 61, 16: 0}  # by bytes of a row; 16: none
_F32 = 1 << 4  # sums, in an instruction descriptor
# Kind of a product, and its operands' type in an instruction descriptor.
_KINDS = {"f16": ("f16", 0), "bf16": ("f16", 1), "f8e4m3": ("f8f6f4", 0)}


def descriptor(address: Int32, row_bytes: int) -> Int64:
    """Of rows that start at ``address``, which eight rows' bytes divide, one behind another."""
    fixed = 8 * row_bytes >> 4 << 32 | _VERSION | _SWIZZLES[row_bytes]
    fixed -= (fixed >> 63) << 64  # as a signed number
    return Int64((address & 0x3FFFF) >> 4) | Int64(fixed)


def swizzled(row: Int32, chunk: Int32, row_bytes: int) -> Int32:
    """Where 16 bytes of a row of 128 or 64 bytes are, from the first row on."""
    return row * row_bytes + (chunk ^ (row & 7 if row_bytes == 128 else row >> 1 & 3)) * 16


@dsl_user_op
def multiply(
    dtype: str, columns: int, sums: Int32, rows: Int64, others: Int64, accumulate: bool, *, loc: Any = None,
    ip: Any = None,
) -> None:  # fmt: skip
    """Issue ``sums (+)= rows others`` for a step: 128 rows x ``columns``, a multiple of 16, to tensor memory."""
    kind, operand = _KINDS[dtype]
    instruction = _F32 | operand << 7 | operand << 10 | columns >> 3 << 17 | ROWS >> 4 << 24
    text = f"{{ .reg .pred p; setp.ne.s32 p, $4, 0; tcgen05.mma.cta_group::1.kind::{kind} [$0], $1, $2, $3, p; }}"
    arguments = [Int32(sums), rows, others, Int32(instruction), Int32(accumulate)]
    asm(None, arguments, text, memory=True, loc=loc, ip=ip)
