"""Products of tensor cores, many by one thread: operands of 16 bits in shared memory, sums in float32 in tensor memory.

CuTeDSL elects a thread for every ``tcgen05.mma``; here whoever calls is that thread, and the descriptors of a sequence
of products differ by what is known beforehand. Formats: PTX ISA, "Matrix Descriptors", "Instruction descriptor",
"Canonical Layouts".
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm

_UNIT = 16  # bytes that descriptors count in
_SWIZZLES = {128: 2, 64: 4, 32: 6}  # by bytes of a line
_EIGHT = 8  # lines after which a swizzle repeats


def descriptor(address: Int32, line: int, group: int = 0) -> Int64:
    """Of an operand whose lines of ``line`` bytes, as wide as its swizzle, follow one another. They run along the
    product's inner axis, or if ``group`` is given along the other: that many bytes from a line to where it goes on."""
    high = (_EIGHT * line // _UNIT) | (1 << 14) | (_SWIZZLES[line] << 29)
    high -= (high >> 31) << 32  # as the bits of an Int32
    low = Int32((Uint32(address) // _UNIT) & 0x3FFF) | (group // _UNIT << 16)
    return (Int64(high) << 32) | Int64(low)


def instruction(dtype: Any, m: int, n: int, *, across: bool) -> int:
    """What a product is: (m, 16) times (16, n); ``across``: lines of both operands run along m and n."""
    kind = int(dtype is cutlass.BFloat16)
    sizes = (n // 8 << 17) | (m // 16 << 24)
    return (1 << 4) | (kind << 7) | (kind << 10) | (int(across) << 15) | (int(across) << 16) | sizes


@dsl_user_op
def multiply(
    column: Int32, a: Int64, b: Int64, steps: list[tuple[int, int]], instruction: int, accumulate: Int32, *,
    loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """To the sums from ``column`` on add the products of all ``steps``, which say how many bytes behind those of the
    descriptors their operands are; the first replaces them where ``accumulate`` is 0."""
    form = "tcgen05.mma.cta_group::1.kind::f16 [$0], x, y, w"
    text = (
        f"{{ .reg .pred p, q; .reg .b64 x, y; .reg .b32 w; mov.b32 w, {instruction}; setp.ne.s32 p, $3, 0; "
        "setp.eq.s32 q, 0, 0; "
    )
    for i, (of_a, of_b) in enumerate(steps):
        text += f"add.s64 x, $1, {of_a // _UNIT}; add.s64 y, $2, {of_b // _UNIT}; {form}, {'q' if i else 'p'}; "
    asm(None, [Int32(column), Int64(a), Int64(b), Int32(accumulate)], text + "}", memory=True, loc=loc, ip=ip)
