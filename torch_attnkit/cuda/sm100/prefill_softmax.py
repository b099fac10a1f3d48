"""The arithmetic of one row of scores, all of which one thread holds, two numbers to an instruction where that exists.

Scores stay unscaled; ``c`` (scale times log2 e) is folded into the exponential: p = 2^(s c - m c). The maximum that a
row subtracts may lag behind: as long as no score exceeds it by more than 2^LAG the output needs no rescaling, and the
sums stay far from overflow. Imports cutlass.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..warp_ops import exp2

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LAG = 8.0  # as FlashAttention-4 has it; P then stays below 2^8, which fp16 holds too


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(llvm.inline_asm(T.f32(), values, "max.f32 $0, $1, $2, $3;", "=f,f,f,f", has_side_effects=False))


@dsl_user_op
def pack(low: Float32, high: Float32, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 numbers rounded to bf16 or fp16 in one register."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    text = f"cvt.rn.{name}.f32 $0, $2, $1;"
    return Int32(llvm.inline_asm(T.i32(), values, text, "=r,f,f", has_side_effects=False))


def row_max(s: list[Float32], start: Float32) -> Float32:
    """Four chains of three-input maxima."""
    peaks = [max3(start, s[0], s[1]), *(max3(s[2 * i], s[2 * i + 1], s[2 * i]) for i in (1, 2, 3))]
    for n, i in enumerate(range(8, len(s), 2)):
        peaks[n % 4] = max3(peaks[n % 4], s[i], s[i + 1])
    return max3(max3(peaks[0], peaks[1], peaks[2]), peaks[3], peaks[3])


def followed(old: Float32, top: Float32, c: Float32) -> tuple[Float32, Float32]:
    """What a row subtracts from now on, ``top`` where that exceeds ``old`` by too much, and the factor for the past."""
    grows = (top - old) * c > LAG  # where both are -inf the difference is NaN, and nothing grows
    return cutlass.select_(grows, top, old), cutlass.select_(grows, exp2((old - top) * c), Float32(1.0))


def probabilities(s: list[Float32], c: Float32, offset: Float32) -> list[Float32]:
    """2^(s c + offset)."""
    out: list[Float32] = []
    for i in range(0, len(s), 2):
        pair = cute.arch.fma_packed_f32x2((s[i], s[i + 1]), (c, c), (offset, offset))
        out += [exp2(x) for x in pair]
    return out


def row_sum(p: list[Float32], start: Float32) -> Float32:
    """Four chains of packed additions."""
    sums = [(p[2 * i], p[2 * i + 1]) for i in range(4)]
    sums[0] = cute.arch.add_packed_f32x2(sums[0], (start, Float32(0.0)))
    for n, i in enumerate(range(8, len(p), 2)):
        sums[n % 4] = cute.arch.add_packed_f32x2(sums[n % 4], (p[i], p[i + 1]))
    sums[0] = cute.arch.add_packed_f32x2(sums[0], sums[1])
    sums[2] = cute.arch.add_packed_f32x2(sums[2], sums[3])
    low, high = cute.arch.add_packed_f32x2(sums[0], sums[2])
    return low + high


def rescaled(values: list[Float32], factor: Float32) -> list[Float32]:
    out: list[Float32] = []
    for i in range(0, len(values), 2):
        out += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
    return out


def capped(s: list[Float32], slope: Float32) -> list[Float32]:
    """tanh(slope * s), as 1 - 2 / (1 + e^2x): the hardware's tanh keeps 11 bits, too few for the LSE."""
    k = slope * Float32(2 * LOG2_E)
    return [Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(exp2(x * k) + 1.0) for x in s]


class Limits(NamedTuple):
    """Which columns a row sees: those in [low, high), and [sinks, sinks_end), below ``end``. None: no such limit."""

    low: Any = None
    high: Any = None
    sinks: Any = None
    sinks_end: Any = None
    end: Any = None


def keep_within(s: list[Float32], limits: Limits) -> list[Float32]:
    """-inf where the column is not one that the row sees."""
    out = []
    for i, value in enumerate(s):
        column = Int32(i)
        tests = []
        if limits.low is not None:
            tests.append(column >= limits.low)
        if limits.high is not None:
            tests.append(column < limits.high)
        seen = functools.reduce(operator.and_, tests) if tests else None
        if limits.sinks_end is not None:
            sink = column < limits.sinks_end
            if limits.sinks is not None:
                sink &= column >= limits.sinks
            seen = seen | sink
        if limits.end is not None:
            below = column < limits.end
            seen = below if seen is None else seen & below
        out.append(value if seen is None else cutlass.select_(seen, value, -Float32.inf))
    return out
