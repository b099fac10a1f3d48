"""The arithmetic of one row of scores, all of which one thread holds, two numbers to an instruction where that exists.

Scores stay unscaled; ``c`` (scale times log2 e) is folded into the exponential: p = 2^(s c - m c). The maximum that a
row subtracts may lag behind: as long as no score exceeds it by more than 2^LAG the output needs no rescaling, and the
sums stay far from overflow.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.warp_ops import exp2

from . import exponentials

LAG = 8.0  # as FlashAttention-4 has it; P then stays below 2^8, which fp16 holds too
# E4M3 reaches from 2^-9, or 2^-6 with all its bits, to 448: P is multiplied by 2^8 for the many small weights of a long
# row, by a product, since an offset in the exponent would cost the LSE its last bits. No maximum lags, so that a row's
# largest weight is a power of two, which E4M3 has exactly. docs/lab/prefill.md has the errors of other choices.
CODES_UNIT, CODES_LAG = 2.0**8, 0.0


def packed(values: list[Float32], dtype: Any) -> list[Int32]:
    """Probabilities rounded to bf16, fp16 or, times CODES_UNIT, to E4M3, as many to a register as fit."""
    if dtype.width == 8:
        values = rescaled(values, Float32(CODES_UNIT))
        return [op.pack_e4m3(values[i : i + 4]) for i in range(0, len(values), 4)]
    return [op.pack(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]


def row_max(s: list[Float32], start: Float32) -> Float32:
    """Four chains of three-input maxima."""
    peaks = [op.max3(start, s[0], s[1]), *(op.max3(s[2 * i], s[2 * i + 1], s[2 * i]) for i in (1, 2, 3))]
    for n, i in enumerate(range(8, len(s), 2)):
        peaks[n % 4] = op.max3(peaks[n % 4], s[i], s[i + 1])
    return op.max3(op.max3(peaks[0], peaks[1], peaks[2]), peaks[3], peaks[3])


def followed(old: Float32, row_max: Float32, c: Float32, lag: float = LAG) -> tuple[Float32, Float32]:
    """The maximum to subtract: the row's if it exceeds ``old`` by more than LAG, else ``old``; and the factor that
    rescales what has been accumulated."""
    grows = (row_max - old) * c > lag  # where both are -inf the difference is NaN, and nothing grows
    return cutlass.select_(grows, row_max, old), cutlass.select_(grows, exp2((old - row_max) * c), Float32(1.0))


def probabilities(s: list[Float32], c: Float32, offset: Float32, eighths: int) -> list[Float32]:
    """2^(s c + offset); of 8 that many as polynomials, see ``exponentials``."""
    out: list[Float32] = []
    for i in range(0, len(s), 2):
        pair = cute.arch.fma_packed_f32x2((s[i], s[i + 1]), (c, c), (offset, offset))
        out += exponentials.exp2_pair(pair) if exponentials.chosen(i // 2, eighths) else [exp2(x) for x in pair]
    return out


def exact_probabilities(s: list[Float32], c: Float32, top: Float32, eighths: int) -> list[Float32]:
    """2^((s - top) c), for sums that are results: an fma with the rounded top c leaves 2^-24 of a score behind."""
    differences: list[Float32] = []
    for i in range(0, len(s), 2):
        differences += cute.arch.add_packed_f32x2((s[i], s[i + 1]), (-top, -top))
    return probabilities(differences, c, Float32(0.0), eighths)


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
    """The scores, capped."""
    return [op.soft_cap(x, slope) for x in s]


class MaskBounds(NamedTuple):
    """Which columns a row sees: those in [low, high), and [sinks, sinks_end), below ``end``. None: no such limit."""

    low: Any = None
    high: Any = None
    sinks: Any = None
    sinks_end: Any = None
    end: Any = None


def masked(s: list[Float32], bounds: MaskBounds) -> list[Float32]:
    """-inf where the column is not one that the row sees."""
    out = []
    for i, value in enumerate(s):
        column = Int32(i)
        tests = []
        if bounds.low is not None:
            tests.append(column >= bounds.low)
        if bounds.high is not None:
            tests.append(column < bounds.high)
        seen = functools.reduce(operator.and_, tests) if tests else None
        if bounds.sinks_end is not None:
            sink = column < bounds.sinks_end
            if bounds.sinks is not None:
                sink &= column >= bounds.sinks
            seen = seen | sink
        if bounds.end is not None:
            below = column < bounds.end
            seen = below if seen is None else seen & below
        out.append(value if seen is None else cutlass.select_(seen, value, -Float32.inf))
    return out
