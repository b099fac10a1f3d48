"""The arithmetic between the two products of a prefill kernel, on the registers of one warpgroup.

An accumulator of 64 rows (``wgmma`` m64) gives lane ``l`` of warp ``w`` the rows ``16 w + l / 4`` and 8 below it, and
of every group of 8 columns the two from ``2 (l % 4)``. In register order: element ``a + 2 r + 4 v`` is column
``8 v + 2 (l % 4) + a`` of row ``r``. The A operand of the second product has the same order, so P needs no shuffle.

Scores stay unscaled; ``scale_log2`` (scale times log2 e) is folded into the exponential: ``p = 2^(s c - max c)``.
"""

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..warp_ops import exp2, tanh

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dsl_user_op
def pack(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:
    """Two fp32 numbers rounded to bf16 or fp16 in one register."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    word = llvm.inline_asm(T.i32(), values, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False)
    return Int32(word)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(llvm.inline_asm(T.f32(), values, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", has_side_effects=False))


def pack_into(words: cute.Tensor, acc: cute.Tensor, dtype: type) -> None:
    """Round an accumulator into ``words``, a 32-bit view of an A operand or of output pairs."""
    for i in range(cute.size(words)):
        words[i] = pack(acc[2 * i], acc[2 * i + 1], dtype)


def cap(acc: cute.Tensor, slope: Float32) -> None:
    """tanh(slope * s)."""
    for i in range(cute.size(acc)):
        acc[i] = tanh(acc[i] * slope)


class Limits(NamedTuple):
    """Which columns two rows see, counted from this lane's first: those in [low, high) and sinks; None: no such limit.

    ``lows`` and ``highs`` hold one number per row; sinks are the columns in [sinks, sinks_end) below ``ends``.
    """

    lows: Any = None
    highs: Any = None
    sinks: Any = None
    sinks_end: Any = None
    ends: Any = None


def keep_within(acc: cute.Tensor, limits: Limits) -> None:
    """-inf where the column is not one that the row sees."""
    for i in range(cute.size(acc)):
        column, row = Int32(i // 4 * 8 + i % 2), i // 2 % 2
        tests = []
        if limits.lows is not None:
            tests.append(column >= limits.lows[row])
        if limits.highs is not None:
            tests.append(column < limits.highs[row])
        seen = functools.reduce(operator.and_, tests) if tests else None
        if limits.sinks_end is not None:
            sink = column < limits.sinks_end
            if limits.sinks is not None:
                sink &= column >= limits.sinks
            seen = seen | sink
        if limits.ends is not None:
            below = column < limits.ends[row]
            seen = below if seen is None else seen & below
        acc[i] = cutlass.select_(seen, acc[i], -Float32.inf)


def peak(acc: cute.Tensor, r: int) -> Float32:
    """The maximum of row ``r``, in all four lanes that have a part of it."""
    mine = [i for i in range(cute.size(acc)) if i // 2 % 2 == r]
    peaks = [acc[i] for i in mine[:4]]
    for n, i in enumerate(mine[4:]):
        peaks[n % 4] = cute.arch.fmax(peaks[n % 4], acc[i])
    top = cute.arch.fmax(cute.arch.fmax(peaks[0], peaks[1]), cute.arch.fmax(peaks[2], peaks[3]))
    for distance in (1, 2):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
    return top


def online(
    acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor, scale_log2: Float32, *, first: bool, exact: bool = False
) -> list:
    """Scores to probabilities in place, with the row maxima and sums brought up to date.

    ``top`` holds unscaled maxima, ``total`` this lane's share of the sums. Returns what each row's output so far must
    be multiplied by. A row that has seen nothing keeps -inf as its maximum and subtracts 0. ``exact`` is for sums that
    are results: it scales differences, one instruction more. What an fma with the rounded offset leaves, 2^-24 of a
    score, is in numerator and denominator alike.
    """
    scales = []
    for r in range(2):
        mine = [i for i in range(cute.size(acc)) if i // 2 % 2 == r]
        new = peak(acc, r)
        if not first:
            new = cute.arch.fmax(new, top[r])
        safe = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        offset = -(safe * scale_log2)
        if first:
            total[r] = Float32(0.0)
        else:
            # Not an fma with the rounded offset: its residue would turn a factor of 1 into another, at every block.
            scales.append(exp2((top[r] - safe) * scale_log2))
            total[r] = total[r] * scales[r]
        top[r] = new
        sums = [total[r], None]
        for n, i in enumerate(mine):
            acc[i] = exp2((acc[i] - safe) * scale_log2 if exact else fma(acc[i], scale_log2, offset))
            sums[n % 2] = acc[i] if sums[n % 2] is None else sums[n % 2] + acc[i]
        total[r] = sums[0] + sums[1]
    return scales


def rescale(acc: cute.Tensor, scales) -> None:
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scales[i // 2 % 2]


def transpose_quads(words: list, lane: Int32) -> list:
    """Four 32-bit words per lane, exchanged among four lanes: word j of lane q becomes word q of lane j."""
    words = list(words)
    for step in (1, 2):
        upper = (lane & step) != 0
        for low in [j for j in range(4) if not j & step]:
            high = low | step
            sent = cutlass.select_(upper, words[low], words[high])
            got = cute.arch.shuffle_sync_bfly(sent, offset=step)
            words[low] = cutlass.select_(upper, got, words[low])
            words[high] = cutlass.select_(upper, words[high], got)
    return words
