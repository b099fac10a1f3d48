"""E2M1 codes by Blackwell's conversion instruction, and the largest magnitude of a block."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm


@dsl_user_op
def e2m1_pairs(values: list[Any], *, loc: Any = None, ip: Any = None) -> Int32:
    """E2M1 codes of eight numbers, the first in bits 0..3: to nearest, ties to even, at most 6; NaN is +6."""
    parts = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1}; " for i in range(4))
    text = f"{{ .reg .b8 b0, b1, b2, b3; {parts}mov.b32 $0, {{b0, b1, b2, b3}}; }}"
    return asm(Int32, list(values), text, loc=loc, ip=ip)


@dsl_user_op
def _larger(top: Float32, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return asm(Float32, [Float32(top), Float32(a), Float32(b)], "max.abs.f32 $0, $1, $2, $3;", loc=loc, ip=ip)


def amax(values: list[Any]) -> Float32:
    """The largest magnitude of an even count of numbers. NaN is skipped; nothing but NaN gives 0."""
    top = Float32(0)
    for i in range(0, len(values), 2):
        top = _larger(top, values[i], values[i + 1])
    return top
