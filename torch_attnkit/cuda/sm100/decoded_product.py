"""Products of 16-bit numbers on Blackwell whose first operand was written to tensor memory by warps: ``tcgen05.mma`` of
kind ``f16``.

    A (128 lanes)   bf16, two a column of tensor memory, the first in its lower half
    B (N rows)      bf16, 64 numbers of a row in 128 bytes of shared memory that TMA swizzles
    D (128 lanes)   float32 sums in N columns of tensor memory

N is a number of the instruction descriptor, so that a kernel multiplies as many rows of B as there are. Source: PTX ISA
9.7.16.4 (descriptors).
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm
from .products import descriptor

STEP = 16  # numbers of a row that a product takes
LEAST_ROWS = 16  # of B, which come in multiples of that
ROW_BYTES = 128  # of a row of a box of B
BOX = ROW_BYTES // 2  # numbers of it
_LANES = 128
_F32, _BF16 = 1, 1  # of the instruction descriptor
_FIXED = _F32 << 4 | _BF16 << 7 | _BF16 << 10 | _LANES >> 4 << 24


def instruction(rows: Int32) -> Int32:
    """The instruction descriptor of a product with so many rows of B, a multiple of 16."""
    return Int32(_FIXED) | (Int32(rows) >> 3 << 17)


@dsl_user_op
def _multiply(
    d: Int32, a: Int32, b: Int64, instruction: Int32, accumulate: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    text = "{ .reg .pred p; setp.ne.b32 p, $4, 0; tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], $2, $3, p; }"
    values = [Int32(d), Int32(a), Int64(b), Int32(instruction), Int32(accumulate)]
    asm(None, values, text, memory=True, loc=loc, ip=ip)


def multiply(d: Int32, a: Int32, box: Int32, step: int, instruction: Int32, accumulate: Int32) -> None:
    """A step of a box. ``a``: the step's first column; ``accumulate`` 0 forgets what is in ``d``. By one thread."""
    _multiply(d, a, descriptor(box + step * STEP * 2, ROW_BYTES), instruction, accumulate)
